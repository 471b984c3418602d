"""From log lines to events: matched patterns, and failures assembled from tracebacks.

Text that a client sent is never evidence: lines of the request loggers, access lines, and
everything that was not written by a server. A traceback is the header, its frames and the
exception line after them::

    (EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:1] Traceback (most recent call last):
    (EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:1]   File "/x/core.py", line 8, in step
    (EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory...
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

from oomwatch.diagnose.client_text import (
    access_status,
    is_client_text,
    own_words,
    without_repeated,
)
from oomwatch.diagnose.items import Failure, LogEvent
from oomwatch.diagnose.tracebacks import (
    MAX_MESSAGE,
    TABLE,
    OpenMessage,
    OpenTraceback,
    cut,
    finish,
    standalone,
)
from oomwatch.engines.patterns import Pattern
from oomwatch.records import LogLine

__all__ = ["TABLE", "Extractor", "Failure", "LogEvent", "extract"]


_TRACEBACK: Final = "Traceback (most recent call last)"
_FRAME: Final = re.compile(r'^\s*(?:\| )*\s*File "([^"]{1,400})", line \d+(?:, in (\S{1,200}))?')
_BOX: Final = ("│", "╭", "╰")
"""First characters of the lines of a traceback that `rich` draws, as TGI and notebooks print it."""
_EXCEPTION: Final = re.compile(
    r"^(?:\| |\+ )*((?:[A-Za-z_][\w]*\.)*[A-Za-z_]\w*)(?:\([^)]{0,60}\))?(?:: |:$|$)(.*)", re.DOTALL
)
_EXCEPTION_NAME: Final = re.compile(
    r"(?:Error|Exception|Timeout|Exit|Interrupt|OutOfResources|Warning|Failure|NoMemory)$"
)
_REPR: Final = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception))\(['\"]")
_PARAMS: Final = "params: SamplingParams("
REQUEST: Final = Pattern(
    "vllm.request_params",
    "hint",
    "SamplingParams(",
    r"SamplingParams\((?:.{0,2000}?[ ,(]prompt_logprobs=(?P<prompt_logprobs_count>\d+))?.{0,4000}?(?:lora_request: (?P<lora>LoRARequest))?",
    "params: SamplingParams(n=1, prompt_logprobs=5), lora_request: None.",
    "..0.20.0",
)
_ANNOUNCES: Final = re.compile(
    r"^(?:Process \S+:|Exception in |Exception ignored|Task exception was never retrieved|Unhandled exception"
    r"|Unhandled error|Fatal |The above exception was|During handling of|future: <)"
)
"""What Python and servers print just before a traceback of their own."""
_WORKER_EXCEPTION: Final = re.compile(
    r"^Exception in worker \S+ while processing method (?P<method>\w+)[:.] ?(?P<text>.*)"
)
_ENDS_MESSAGE: Final = (
    "Process ",
    "The above exception",
    "During handling",
    "Killed",
    "Terminated",
    "Segmentation fault",
    "Fatal Python error",
    "terminate called",
    "Out of memory: Kill",
    "Memory cgroup out of memory: Kill",
    "NVRM: ",
)
"""What begins a new line of its own, however bare."""
_SEVERE: Final = ("ERROR", "CRITICAL", "FATAL")
_CUT_AT_START: Final = 40
"""Lines from the start of the input in which bare frames count although their header is missing."""
_FAILED_STEP: Final = re.compile(
    r"(?:Failed to|Error (?:while|in)|Could not|Cannot) [\w .'-]{1,80}: (?:CUDA|HIP) out of memory\. Tried to allocate "
)
"""What a program logs, without a level, of an allocation that one of its steps could not get."""
_MAX_SOURCE: Final = 600


class Extractor:
    """Turns lines, fed in order, into events and failures."""

    def __init__(self, orders: Iterator[int] | None = None) -> None:
        """`orders` numbers the lines of all files and containers that are read together."""
        self._orders = itertools.count(1) if orders is None else orders
        self._open: dict[str, OpenTraceback] = {}
        self._message: dict[str, OpenMessage] = {}
        self._last: dict[str, str] = {}
        self._before: dict[str, LogLine] = {}
        self._times: dict[str, float] = {}
        self._order = 0
        self._lines = 0

    @property
    def is_open(self) -> bool:
        """Whether an exception is being read that no other line has ended yet."""
        return bool(self._open or self._message)

    def _is_announced(self, header: LogLine) -> bool:
        """Whether a program introduces the traceback that begins here."""
        if header.prefixed or not header.text.startswith(_TRACEBACK):
            return True
        before = self._before.get(header.source)
        if before is None:
            return True
        return before.level in _SEVERE or _ANNOUNCES.match(before.text) is not None

    def _key(self, line: LogLine) -> str:
        """Whose line this is. A bare line goes on with the record of the line before it.

        SGLang, torchrun and Python itself prefix only the first line of a record.
        """
        key = f"{line.source}\0{line.process}\0{line.pid}\0{line.rank}"
        bare = not line.prefixed and line.process is None and line.pid is None and line.rank is None
        if bare:
            last = self._last.get(line.source)
            goes_on = last is not None and (last in self._open or last in self._message)
            opens = _TRACEBACK in line.text and not line.text[:1].isspace()
            if last is not None and goes_on and (not opens or last in self._message):
                return last
        self._last[line.source] = key
        return key

    def feed(self, line: LogLine) -> Iterator[LogEvent | Failure]:
        """The events that this line completes."""
        self._lines += 1
        self._order = next(self._orders)
        seen_at = self._times.get(line.source)
        if line.at is not None:
            seen_at = self._times[line.source] = line.at
        for item in self._feed(line):
            known = item.seen_at is not None or seen_at is None
            yield item if known else dataclasses.replace(item, seen_at=seen_at)
        if line.text and not line.text.isspace():
            self._before[line.source] = line

    def _feed(self, line: LogLine) -> Iterator[LogEvent | Failure]:
        key = self._key(line)
        text = line.text
        message = self._message.get(key)
        if message is not None:
            if self._continues(message, line):
                message.details.append(line)
                if len(message.parts) < 40:
                    message.parts.append(text)
                return
            del self._message[key]
            yield finish(message)
        if is_client_text(line):
            yield from self._request(line)
            own = own_words(line.text)
            if own is not None:
                yield from self._line(dataclasses.replace(line, text=own))
            return
        opened = self._open.get(key)
        if opened is not None:
            frame = _FRAME.match(text)
            if frame is not None:
                opened.add(frame[1], frame[2] or "?")
                return
            if text.startswith(_BOX):
                opened.add_boxed(text)
                return
            if text[:1] in (" ", "\t", "") or text.startswith(("^", "~")):
                if text.strip(" \t^~"):
                    opened.code = text.strip()[:200]
                    opened.source = f"{opened.source} {text.strip()}"[:_MAX_SOURCE]
                return
            exception = _EXCEPTION.match(text) if _TRACEBACK not in text else None
            if exception is not None and _is_exception(exception[1], bool(opened.frames)):
                del self._open[key]
                self._message[key] = OpenMessage(
                    exception[1],
                    [exception[2]],
                    line,
                    self._order,
                    opened,
                )
                return
            if opened.frames and not _is_new_record(opened.header, line):
                # The frames ended without an exception line that we know: the traceback was cut.
                del self._open[key]
                yield cut(opened)
            elif _TRACEBACK not in text:
                del self._open[key]
                if opened.frames:
                    yield cut(opened)
        elif (frame_line := _FRAME.match(text)) and (line.prefixed or self._lines <= _CUT_AT_START):
            # The header is missing: the log was cut in the middle of a traceback.
            opened = self._open[key] = OpenTraceback(
                line, self._order, line.prefixed, self._times.get(line.source)
            )
            opened.add(frame_line[1], frame_line[2] or "?")
            return
        if _TRACEBACK in text and not text[:1].isspace():
            previous = self._open.pop(key, None)
            if previous is not None and previous.frames:
                yield cut(previous)
            self._open[key] = OpenTraceback(
                line, self._order, self._is_announced(line), self._times.get(line.source)
            )
        alone = self._alone(line)
        if alone is not None:
            self._message[key] = alone
            return
        yield from self._line(line)

    def _alone(self, line: LogLine) -> OpenMessage | None:
        """The exception of a line whose traceback is missing, where nothing else is said in it."""
        text = line.text
        name = _EXCEPTION.match(text) if line.level is None else None
        if name is None or not _EXCEPTION_NAME.search(name[1]) or _REPR.match(text):
            return None
        if not (_is_deciding(text) or _is_deciding(name[2])) or any(TABLE.match_line(text)):
            return None
        opened = OpenTraceback(line, self._order, line.prefixed, self._times.get(line.source))
        return OpenMessage(name[1], [name[2]], line, self._order, opened, alone=True)

    def close(self) -> Iterator[Failure]:
        """The failures that the end of the input completes."""
        for message in self._message.values():
            yield finish(message)
        for opened in self._open.values():
            if opened.frames:
                yield cut(opened)
        self._message.clear()
        self._open.clear()

    @staticmethod
    def _continues(message: OpenMessage, line: LogLine) -> bool:
        text = line.text
        if len(message.parts) >= 14 or sum(map(len, message.parts)) > MAX_MESSAGE:
            return False
        if _TRACEBACK in text or text.startswith(_ENDS_MESSAGE):
            return False
        if text[:1].isspace() and _FRAME.match(text):
            return False
        if message.alone and not _goes_on(line):
            return False
        if line.origin != message.line.origin or (line.prefixed and not message.line.prefixed):
            return False
        if line.prefixed and message.line.origin is None and line.text and _starts_record(line):
            return False
        return access_status(text) is None and not text.startswith("INFO:")

    def _request(self, line: LogLine) -> Iterator[LogEvent]:
        """What the engine says of a request's own parameters, never what the client wrote."""
        start = line.text.rfind(_PARAMS)
        if start >= 0:
            match = REQUEST.search(line.text[start:])
            if match is not None:
                yield LogEvent(REQUEST, REQUEST.fields(match), line, self._order)

    def _line(self, line: LogLine) -> Iterator[LogEvent | Failure]:
        items = list(self._items(line))
        if items and (own := without_repeated(line.text)) != line.text:
            items = list(self._items(dataclasses.replace(line, text=own)))
        yield from items

    def _items(self, line: LogLine) -> Iterator[LogEvent | Failure]:
        text = line.text
        if not text or text.isspace():
            return
        relay = _WORKER_EXCEPTION.match(text)
        if relay is not None:
            yield standalone(
                line, self._order, "WorkerException", relay["text"], f"method:{relay['method']}"
            )
        elif line.level in _SEVERE or _REPR.match(text):
            name = _EXCEPTION.match(text)
            repr_match = _REPR.match(text)
            if repr_match is not None:
                yield standalone(line, self._order, repr_match[1], text[repr_match.end() :])
            elif name is not None and _EXCEPTION_NAME.search(name[1]):
                yield standalone(line, self._order, name[1], name[2])
            elif any(True for _ in TABLE.match_exception(text)):
                yield standalone(line, self._order, "", text)
        elif (
            line.level is None
            and (name := _EXCEPTION.match(text)) is not None
            and _EXCEPTION_NAME.search(name[1])
            and (_is_deciding(text) or _is_deciding(name[2]))
        ):
            # Its traceback is missing: the log was cut, or only the last lines were copied.
            yield standalone(line, self._order, name[1], name[2])
        elif line.level is None and _is_bare_refusal(text):
            # Only the sentence was copied, or a program printed it without the exception's name.
            yield standalone(line, self._order, "", text)
        for pattern, fields in TABLE.match_line(text):
            yield LogEvent(pattern, fields, line, self._order)


def extract(lines: Iterable[LogLine]) -> Iterator[LogEvent | Failure]:
    """All events and failures of a log, in order."""
    extractor = Extractor()
    for line in lines:
        yield from extractor.feed(line)
    yield from extractor.close()


def _is_exception(name: str, after_frames: bool) -> bool:
    return bool(_EXCEPTION_NAME.search(name)) or (after_frames and "." in name)


def _is_deciding(text: str) -> bool:
    """Whether an exception line names a refusal that decides by its words alone."""
    return any(
        pattern.kind in ("check", "oom") or pattern.cause is not None
        for pattern, _ in TABLE.match_exception(text)
    )


def _is_bare_refusal(text: str) -> bool:
    """Whether a line begins with the sentence of an engine's check, or tells of a failed step."""
    if _FAILED_STEP.match(text):
        return True
    return any(
        pattern.kind == "check"
        and pattern.where == "exception"
        and (match := pattern.search(text)) is not None
        and match.start() == 0
        for pattern in TABLE.patterns
    )


def _is_new_record(header: LogLine, line: LogLine) -> bool:
    return line.origin != header.origin or line.prefixed != header.prefixed


def _goes_on(line: LogLine) -> bool:
    """Whether a line may belong to the words of an exception that was copied without its traceback."""
    name = _EXCEPTION.match(line.text)
    return not (
        not line.text
        or line.text.isspace()
        or line.level is not None
        or (name is not None and _EXCEPTION_NAME.search(name[1]))
        or any(TABLE.match_line(line.text))
        or _is_bare_refusal(line.text)
    )


def _starts_record(line: LogLine) -> bool:
    # SGLang prefixes only the first line of a record, so a prefixed line is a new one.
    return line.at is not None and line.origin is None and line.level is None
