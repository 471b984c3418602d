"""What to give where the inputs do not decide, and what in them was found to be about others."""

from __future__ import annotations

from collections.abc import Sequence

from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.inputs import Inputs
from oomwatch.diagnose.rules.processes import exit_evidence
from oomwatch.records import SourceStatus
from oomwatch.units import format_bytes, format_rfc3339


def what_is_missing(all_facts: Sequence[Facts], inputs: Inputs) -> list[SourceStatus]:
    """What to give so that it can be decided; of a live host without an engine, that was said."""
    if inputs.live and not inputs.logs and not inputs.exits:
        return []
    if not (inputs.logs or inputs.pages or inputs.kernel or inputs.engines or inputs.gpus) and any(
        source.status == "warning" for source in inputs.sources
    ):
        return []  # what was given says itself why nothing is in it
    return [_missing(all_facts, inputs), *_strangers(inputs)]


def _missing(all_facts: Sequence[Facts], inputs: Inputs) -> SourceStatus:
    if any(f.run is not None and f.run.is_binary for f in all_facts):
        return SourceStatus(
            "log",
            "warning",
            "this is no text log, but binary data or text in another encoding than UTF-8: give the server's own output",
        )
    if any(f.is_document for f in all_facts):
        return SourceStatus(
            "log",
            "warning",
            "this looks like a document that quotes log lines, not like a log: give the server's own output",
        )
    silent = [e for f in all_facts for e in f.exits if e.exit_code != 0]
    if silent:
        return SourceStatus(
            silent[0].where,
            "warning",
            f"{exit_evidence(silent[0]).text}; what was read of its output does not say why",
        )
    started = [f for f in all_facts if f.run is not None and f.run.engine is not None]
    if any(f.live and not f.ended for f in started):
        return SourceStatus(
            "engines",
            "not_available",
            "the server is still starting and nothing has failed so far: run this again when it serves, or when it has ended",
        )
    if started:
        wanted = "the exit status of the process"
        if not inputs.kernel:
            wanted = f"the kernel log (--kernel-log, or `journalctl -k`) and {wanted}"
        return SourceStatus(
            "log",
            "warning",
            f"the log ends while the engine starts and says no reason: give {wanted}",
        )
    if inputs.logs:
        return SourceStatus(
            "log",
            "warning",
            "nothing in the log was written by a known engine: give the server's own output, stdout and stderr",
        )
    return SourceStatus(
        "inputs",
        "warning",
        "no engine, log or sample was found: give --log FILE, --metrics URL or --recording DIR",
    )


def _strangers(inputs: Inputs) -> list[SourceStatus]:
    """The last kill of each kernel log, which no rule has tied to an engine."""
    found = []
    for log in inputs.kernel:
        kill = next((e for e in reversed(log.events) if e.kind == "oom_kill"), None)
        if kill is None:
            continue
        pid, resident = kill.fields.get("pid"), kill.fields.get("anon_rss_bytes")
        told = [
            f"PID {pid}" if pid else "",
            f"{format_bytes(resident)} resident" if resident else "",
            format_rfc3339(kill.at) if kill.at is not None else "",
        ]
        about = ", ".join(part for part in told if part)
        found.append(
            SourceStatus(
                log.name,
                "warning",
                f"its last OOM kill, of {kill.fields.get('comm') or 'a process'} ({about}), is not taken for the engine's: number, group, name, size or time do not fit",
            )
        )
    return found
