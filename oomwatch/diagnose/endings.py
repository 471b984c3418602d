"""How processes ended, in whatever words: exit codes, signal names, a shell's or a runner's line."""

from __future__ import annotations

import dataclasses
import os
import signal as signals
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.records import LogLine

CRASHES: Final = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE"})
STOPS: Final = frozenset({"SIGTERM", "SIGINT"})
_WORDS: Final = {
    "SEGMENTATION FAULT": "SIGSEGV",
    "SEGFAULT": "SIGSEGV",
    "BUS ERROR": "SIGBUS",
    "ILLEGAL INSTRUCTION": "SIGILL",
    "ABORTED": "SIGABRT",
    "KILLED": "SIGKILL",
}
_ENDS: Final = frozenset(
    {
        "exit.killed",
        "exit.code",
        "exit.signal",
        "exit.systemd",
        "crash.native",
        "crash.heap",
        "tgi.shard_signal",
        "ollama.runner",
        "vllm.worker_died",
        "vllm.worker_died_v0",
        "vllm.engine_process_died",
        "vllm.core_exited",
        "sglang.child_status",
    }
)
_WRAPPER: Final = "vllm.engine_init_failed"
_TOLD: Final = "sglang.child_died"
_SIGNALS: Final = {number.value: number.name for number in signals.Signals}


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """A line that says that a process is gone; `signal` and `exit_code` as far as it says how."""

    line: LogLine
    order: int
    pattern_id: str
    signal: str | None = None
    exit_code: int | None = None

    @property
    def killed(self) -> bool:
        """Whether it was SIGKILL, which no process can log itself."""
        return self.signal == "SIGKILL"

    @property
    def orderly(self) -> bool:
        """Whether the process ended by itself without an error, or because it was asked to."""
        return self.signal in STOPS or (self.signal is None and self.exit_code in (0, 143, 130))


def endings(
    events: Iterable[LogEvent], messengers: Iterable[Failure | LogEvent]
) -> tuple[Ending, ...]:
    """Every line that says how a process ended, in order."""
    events = tuple(events)
    found = [_ending(e.line, e.order, e.pattern.id, e.fields) for e in events if _tells(e)]
    found += _of_wrappers(messengers)
    # SGLang's server, told by a child that it failed, kills its whole tree and itself.
    told = min((e.order for e in events if e.pattern.id == _TOLD), default=None)
    kept = (e for e in found if told is None or e.order < told or not e.killed)
    return tuple(sorted(kept, key=lambda ending: ending.order))


def _tells(event: LogEvent) -> bool:
    return event.pattern.id in _ENDS


def _of_wrappers(messengers: Iterable[Failure | LogEvent]) -> Iterator[Ending]:
    """A failed start names the exit codes of its cores, and mostly nothing else does."""
    for item in messengers:
        if isinstance(item, Failure):
            fields = item.match(_WRAPPER)
        else:
            fields = item.fields if item.pattern.id == _WRAPPER else None
        if fields is not None and "exit_code" in fields:
            yield _ending(item.line, item.order, _WRAPPER, fields)


def _ending(line: LogLine, order: int, pattern_id: str, fields: Mapping[str, Any]) -> Ending:
    code = _integer(fields.get("exit_code"))
    if "wait_status" in fields:
        code = _of_wait(_integer(fields["wait_status"]))
    name = _name(fields.get("signal")) or _of_code(code)
    if name is None and pattern_id == "exit.killed":
        name = "SIGKILL"
    if name is None and pattern_id == "crash.heap":
        name = "SIGABRT"
    return Ending(line, order, pattern_id, name, code)


def _of_code(code: int | None) -> str | None:
    """The signal of Python's negative, or a shell's 128 + n."""
    if code is None:
        return None
    number = -code if code < 0 else code - 128
    return _SIGNALS.get(number)


def _of_wait(status: int | None) -> int | None:
    """Python's code of an undecoded status of waitpid: negative for a signal."""
    if status is None or status < 0:
        return status
    try:
        return os.waitstatus_to_exitcode(status)
    except (ValueError, OverflowError):
        return None


def _name(value: object) -> str | None:
    if value is None:
        return None
    text = str(value).strip().upper()
    if text.isdigit():
        return _SIGNALS.get(int(text))
    known = _WORDS.get(text, text if text.startswith("SIG") else f"SIG{text}")
    return known if known in _SIGNALS.values() else None


def _integer(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None
