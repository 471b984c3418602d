"""Where in a log another start begins: where a process says again what it says once a start.

Equal PIDs tell nothing: every start of a container counts them from 1. Several API servers, or the
cores of a data-parallel server, print the same lines within one start, but under names of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomwatch.diagnose.events import LogEvent
    from oomwatch.diagnose.runs import Run

BANNERS: Final = frozenset(
    {
        "vllm.api_banner",
        "vllm.logo_version",
        "vllm.plain_banner",
        "sglang.server_args",
        "tgi.args",
    }
)
"""With what a server begins."""
_ARGUMENTS: Final = frozenset({"vllm.non_default_args", "vllm.namespace", "llama.build"})
"""What follows a banner, or stands in its place; never the only sign of a start that went nowhere."""
_CORE: Final = "vllm.engine_banner"
_OLLAMA: Final = "ollama.server"
"""Its server names its version as it begins to listen; the runners that it starts do not."""


def begins_start(run: Run, event: LogEvent, *, failing: bool = False) -> bool:
    """Whether this line belongs to a later start than the lines of the run before it.

    `failing` is whether an exception stands right above it.
    """
    name = event.pattern.id
    listens = name == _OLLAMA and "version" in event.fields
    if not listens and name != _CORE and name not in BANNERS and name not in _ARGUMENTS:
        return False
    failed = failing or bool(run.failures) or run.ended is not None
    got_far = failed or run.reached("load")
    before = _said_before(run, event)
    if name == _CORE:
        return got_far and before is not None and before.line.rank == event.line.rank
    if run.is_empty or (run.engine is None and not failed):
        return False
    if listens or name in _ARGUMENTS:
        return got_far and (before is not None or not _beside(run, event))
    if before is not None:
        same_process = before.line.pid is not None and before.line.pid == event.line.pid
        return got_far or not same_process
    return failed if _beside(run, event) else got_far


def _said_before(run: Run, event: LogEvent) -> LogEvent | None:
    """The last line of the same words by a process of the same name."""
    return next(
        (
            before
            for before in reversed(run.events)
            if before.pattern.id == event.pattern.id and before.line.process == event.line.process
        ),
        None,
    )


def _beside(run: Run, event: LogEvent) -> bool:
    """Whether it is one of several servers of a start: another name has printed its banner."""
    return event.line.process is not None and any(
        before.line.process not in (None, event.line.process)
        for before in run.events
        if before.pattern.id in BANNERS
    )
