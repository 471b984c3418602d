"""Log lines as text again, such as every reader of logs understands.

``2026-11-29T03:00:00.250000Z stdout F (EngineCore pid=42) ERROR 11-29 03:00:00 [core.py:708] …``

The time stands in front as container runtimes write it, since it names its zone; behind it the
prefix of vLLM or SGLang, as far as the line had one.
"""

from __future__ import annotations

import datetime
import re
from typing import Final

from oomwatch.records import KernelEvent, LogLine

_ORIGIN: Final = re.compile(r"[^\]\n:]{1,120}:\d{1,6}")


def render_line(line: LogLine, text: str | None = None) -> str:
    """The line with its time and prefix; with `text` in the place of its own."""
    body = prefix_of(line) + (line.text if text is None else text)
    if line.at is None:
        return body
    at = datetime.datetime.fromtimestamp(line.at, datetime.UTC)
    stream = line.stream if line.stream in {"stdout", "stderr"} else "stdout"
    return f"{at.strftime('%Y-%m-%dT%H:%M:%S.%f')}Z {stream} F {body}"


def prefix_of(line: LogLine) -> str:
    """What an engine prints before a line: process, level, time, origin or rank."""
    if not line.prefixed:
        return ""
    at = datetime.datetime.fromtimestamp(line.at or 0, datetime.UTC)
    process = ""
    if line.process is not None and line.pid is not None:
        process = f"({line.process} pid={line.pid}) "
    elif line.pid is not None:
        process = f"(pid={line.pid}) "
    elif line.process is not None:
        process = f"({line.process} pid=0) "
    if line.level and line.origin and _ORIGIN.fullmatch(line.origin):
        return f"{process}{line.level} {at.strftime('%m-%d %H:%M:%S')} [{line.origin}] "
    if line.rank is not None and not process:
        ranks = line.rank if not line.rank.isdigit() else f"TP{line.rank}"
        level = f"{line.level}: " if line.level else ""
        return f"[{at.strftime('%Y-%m-%d %H:%M:%S')} {ranks}] {level}"
    if line.level is not None:
        return f"{process}{line.level}:{' ' * max(1, 9 - len(line.level))}"
    return process or f"[{at.strftime('%Y-%m-%d %H:%M:%S')}] "


def kernel_line(event: KernelEvent) -> str:
    """What the kernel said, as ``dmesg --time-format iso`` prints it."""
    if event.at is None:
        return event.text
    at = datetime.datetime.fromtimestamp(event.at, datetime.UTC)
    return f"{at.strftime('%Y-%m-%dT%H:%M:%S,%f')}+00:00 {event.text}"
