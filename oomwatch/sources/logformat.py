r"""Takes off what runtimes, shippers and terminals put around a log line.

Each layer is peeled from the outside in, until none is left::

    vllm-1  | 2025-03-12T06:09:16.0703Z stderr F (EngineCore pid=7) …      compose, CRI
    {"log":"INFO 05-09 …\n","stream":"stderr","time":"2025-…Z"}           Docker json-file
    {"MESSAGE":"…","__REALTIME_TIMESTAMP":"1741238955896764","_PID":"7"}   journalctl -o json
    {"message":"…","levelname":"INFO","asctime":"…"}                       vLLM's JSON formatter
    Mar 12 06:09:16 host vllm[123]: …                                      journalctl, syslog
    [pod/vllm-0/server] 2025-03-12T06:09:16.1Z …                           kubectl --prefix
    vllm-0 server (EngineCore pid=7) ERROR …                               stern
    INFO 2025-03-12T06:09:16.1Z [resource.labels.containerName: vllm] …    Google's log explorer
    2025-03-12 06:09:16 | ERROR | stderr | INFO 05-09 …                    FastChat
    [2025-03-12T06:09:16Z] (EngineCore pid=7) …                            Buildkite
    **(EngineCore pid=7) ERROR …**                                         marked in Markdown

Docker's and the CRI's cut lines (16 KiB pieces) are joined again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final, Literal

from oomwatch.engines.prefixes import LEVELS
from oomwatch.sources.logformat_prefix import starts_record, without_emphasis
from oomwatch.sources.logformat_time import Clock

MAX_TEXT: Final = 65_536  # characters of one line that are kept

_ESCAPES: Final = re.compile(
    r"\x1b\][^\x07\x1b]*+(?:\x07|\x1b\\)"  # OSC: window titles, links
    r"|\x1b[PX^_][^\x1b]*+\x1b\\"  # DCS and the like
    r"|(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]"  # CSI: colours, cursor
    r"|\x1b[ -/]{0,3}[0-~]"  # two-byte sequences, character sets
    r"|#033\[[0-9;]{0,20}m"  # as rsyslog escapes them
    r"|\^\[\[[0-9;]{0,20}m"  # as cat -v shows them
)
_BARE_COLOURS: Final = re.compile(r"\[(?:\d{1,3}(?:;\d{1,3}){0,4})m")
_FORBIDDEN: Final = re.compile(
    # C0 and C1 but \r and \n; line separators; bidirectional overrides
    "[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_CRI: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) "
    r"(stdout|stderr) ([FP])(?:$| )"
)
# Behind a bare time stamp, `CUDA error:` looks like a host and a program: one needs its pid here.
_SHORT_ISO: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?[+-]\d\d:?\d\d) "
    r"([A-Za-z0-9_.-]{1,80}) (?:([\w.@:/+-]{1,80})\[(\d{1,10})\]|(kernel)): ?"
)
_SHORT_FULL: Final = re.compile(
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) "
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?(?: UTC)?)(?: [A-Z+-][\w:+-]{1,8})? "
    r"([A-Za-z0-9_.-]{1,80}) ([\w.@:/+-]{1,80})(?:\[(\d{1,10})\])?: ?"
)
_SHORT: Final = re.compile(
    r"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?) "
    r"([A-Za-z0-9_.-]{1,80}) ([\w.@:/+-]{1,80})(?:\[(\d{1,10})\])?: ?"
)
_SHORT_HOSTLESS: Final = re.compile(
    r"((?i:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?) "
    r"()([\w.@:/+-]{1,80})\[(\d{1,10})\]: ?"
)
"""``journalctl --no-hostname``; without a host the program needs its pid to be one."""
_SHORT_UNIX: Final = re.compile(
    r"(\d{9,11}\.\d{1,9}) ([A-Za-z0-9_.-]{1,80}) ([\w.@:/+-]{1,80})(?:\[(\d{1,10})\])?: ?"
)
_SHORT_MONOTONIC: Final = re.compile(
    r"\[ {0,10}\d{1,10}\.\d{3,9}(?: <[ \d.]{1,20}>)?\] "
    r"([A-Za-z0-9_.-]{1,80}) ([\w.@:/+-]{1,80})\[(\d{1,10})\]: ?"
)
_STAMP: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)(?:$|[ \t])"
)
_STREAM: Final = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| (?:DEBUG|INFO|WARNING|ERROR) \| (stdout|stderr) \| ?"
)
"""FastChat's loggers of the two streams; their level says which stream, nothing of the line."""
_BUILD_STAMP: Final = re.compile(r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z)\] ?")
"""Buildkite's time of a line."""
_SUPERVISOR: Final = re.compile(
    r"(?:\d\d:\d\d:\d\d(?:[.,]\d{1,9})? )?\[(Debug|Info|Warning|Error|Critical)\] "
    r"(?:\([A-Z][a-z]{1,30}\) )?"
)
"""Programs that print what a child wrote: level, and which part of themselves says so."""
_COMPOSE: Final = re.compile(r"([A-Za-z0-9][\w.@-]{0,120}) {1,60}\| ?")
_KUBECTL: Final = re.compile(r"\[(pod/[\w./-]{1,250})\] ?")
# Two bare words are no wrapper; what an engine begins a record with must follow them once.
_STERN: Final = re.compile(
    r"([a-z0-9][a-z0-9.-]{2,250} [a-z0-9][a-z0-9-]{1,62} )"
    r"(?=\([A-Z]\w{2,60} [^()]{0,40}pid=\d|\[20\d\d-\d\d-\d\d "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:: {1,6}| \d\d-\d\d ))"
)
_EXPLORER: Final = re.compile(
    r"(?:DEFAULT|DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z) \[resource\.labels\.[^\]]{1,160}\] ?"
)
_RAY_REPEAT: Final = re.compile(
    r" \[repeated \d{1,9}x across (?:all nodes|cluster)\](?: \(Ray deduplicates[^()]{0,300}\))?$"
)
_LEVEL_NAMES: Final = frozenset({"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", *LEVELS})
_MESSAGE_KEYS: Final = ("log", "MESSAGE", "message", "msg", "textPayload")
_TIME_KEYS: Final = ("time", "timestamp", "@timestamp", "asctime", "ts")
_LEVEL_KEYS: Final = ("levelname", "level", "severity")
_LAYERS: Final = 6
_PODS: Final = 64


@dataclasses.dataclass(slots=True)
class Envelope:
    """What the wrappers of one line said."""

    at: float | None = None
    stream: str | None = None
    level: str | None = None
    process: str | None = None
    pid: int | None = None
    origin: str | None = None
    container: str | None = None
    prefixed: bool = False
    piece: Literal["part", "last"] | None = None
    """Whether the layer just peeled may hold a piece of a cut line only."""


def clean(text: str) -> str:
    """The text without terminal sequences; other control characters but CR and LF become blanks."""
    shown = "[" in text and ("#033[" in text or "^[[" in text)
    if shown or "\x1b" in text or "\x9b" in text:
        text = _ESCAPES.sub("", text)
    elif "[0m" in text:  # the escape character was lost on the way, as in pasted logs
        text = _BARE_COLOURS.sub("", text)
    if text.isprintable():
        return text
    text = text.replace("\0", "")
    return _SURROGATE.sub("\ufffd", _FORBIDDEN.sub(" ", text))


def strip_repeat(text: str) -> str:
    """The text without Ray's ``[repeated 7x across cluster]``."""
    return _RAY_REPEAT.sub("", text) if "[repeated " in text else text


class Unwrapper:
    """Peels wrappers of the lines of one file, in order: some span lines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[str, tuple[int, str, Envelope]] = {}  # by stream: pieces of a line
        # journalctl's short formats indent what follows a line feed by the width of the header.
        self._indent = ""
        self._indented = Envelope()
        self._sterns: set[str] = set()  # pod and container that began an engine's record before

    def unwrap(self, number: int, text: str) -> tuple[int, str, Envelope] | None:
        """Number, text and envelope of a line; None while it is a piece of a cut line."""
        envelope = Envelope()
        text = clean(text.removeprefix("\x1e"))  # journalctl -o json-seq
        if self._indent and text.startswith(self._indent):
            return number, text[len(self._indent) :], self._indented
        for _ in range(_LAYERS):
            before, start = text, text[:1]
            if start == "{":
                text = self._peel_json(text, envelope)
            elif start.isdigit():
                text = self._peel_dated(text, envelope)
            elif start == "[":
                text = self._peel_bracket(text, envelope)
            elif start.isalpha():
                text = self._peel_word(text, envelope)
            elif start == "*":
                text = without_emphasis(text)
            if text == before:
                break
            if envelope.piece is not None:
                joined = self._join(number, text, envelope)
                if joined is None:
                    return None
                number, text = joined
        return number, text, envelope

    def flush(self) -> list[tuple[int, str, Envelope]]:
        """The cut lines whose last piece never came."""
        pending = list(self._pending.values())
        self._pending.clear()
        return pending

    def _join(self, number: int, text: str, envelope: Envelope) -> tuple[int, str] | None:
        """Number and text of a line whose last piece this is; None for any piece before."""
        key, piece, envelope.piece = envelope.stream or "", envelope.piece, None
        if piece == "last" and key not in self._pending:
            return number, text
        first, head, _ = self._pending.pop(key, (number, "", envelope))
        whole = (head + text)[:MAX_TEXT]
        if piece == "last":
            return first, whole
        self._pending[key] = (first, whole, envelope)
        return None

    def _peel_json(self, text: str, envelope: Envelope) -> str:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not isinstance(row, dict):
            return text
        key = next((k for k in _MESSAGE_KEYS if isinstance(row.get(k), str | list)), None)
        time = next((row[k] for k in _TIME_KEYS if isinstance(row.get(k), str | float | int)), None)
        level = next((row[k] for k in _LEVEL_KEYS if isinstance(row.get(k), str)), None)
        journal_time = row.get("__REALTIME_TIMESTAMP")
        # A bare {"message": …} may be what a client sent: only a record of a logger is unwrapped.
        if key is None or (
            time is None and level is None and journal_time is None and "stream" not in row
        ):
            return text
        inner = _text_of(row[key])
        if inner is None:
            return text
        self._take_time(journal_time if journal_time is not None else time, envelope)
        if isinstance(row.get("stream"), str) and row["stream"] in {"stdout", "stderr"}:
            envelope.stream = row["stream"]
        if key == "MESSAGE":
            envelope.process = _string(row.get("SYSLOG_IDENTIFIER")) or _string(row.get("_COMM"))
            envelope.pid = _number(row.get("_PID"))
        elif key != "log" and level is not None and level.upper() in _LEVEL_NAMES:
            envelope.level = LEVELS.get(level.upper(), level.upper())
            envelope.process = _string(row.get("vllm_process_name")) or _string(
                row.get("processName")
            )
            envelope.pid = _number(row.get("process"))
            envelope.origin = _string(row.get("name"))
            envelope.prefixed = True
        if key == "log" and "stream" in row:  # Docker cuts at 16 KiB; a whole line ends in \n
            envelope.piece = "last" if inner.endswith("\n") else "part"
        return clean(inner.removesuffix("\n"))

    def _peel_dated(self, text: str, envelope: Envelope) -> str:
        match = _CRI.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            envelope.stream = match.group(2)
            envelope.piece = "last" if match.group(3) == "F" else "part"
            return text[match.end() :]
        match = _STREAM.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            envelope.stream = match.group(2)
            return text[match.end() :]
        match = _SHORT_UNIX.match(text)
        if match is not None:
            self._take_time(float(match.group(1)), envelope)
            return self._take_short(match, text, envelope)
        if starts_record(text):
            return text
        match = _SHORT_ISO.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            return self._take_short(match, text, envelope)
        match = _STAMP.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            text = text[match.end() :]
            supervisor = _SUPERVISOR.match(text)
            return text[supervisor.end() :] if supervisor else text
        return text

    def _peel_bracket(self, text: str, envelope: Envelope) -> str:
        match = _KUBECTL.match(text)
        if match is not None:
            envelope.container = match.group(1)
            return text[match.end() :]
        match = _BUILD_STAMP.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            return text[match.end() :]
        match = _SHORT_MONOTONIC.match(text)
        if match is not None:
            envelope.process, envelope.pid = match.group(2), int(match.group(3))
            self._indent, self._indented = " " * match.end(), envelope
            return text[match.end() :]
        return text

    def _peel_word(self, text: str, envelope: Envelope) -> str:
        if "|" in text[:190]:
            match = _COMPOSE.match(text)
            if match is not None and match.group(1) not in _LEVEL_NAMES:
                envelope.container = match.group(1)
                return text[match.end() :]
        match = _EXPLORER.match(text)
        if match is not None:
            self._take_time(match.group(1), envelope)
            return text[match.end() :]
        pod = self._stern_prefix(text)
        if pod:
            envelope.container = pod.strip()
            return text[len(pod) :]
        match = _SHORT.match(text) or _SHORT_HOSTLESS.match(text)
        if match is not None:
            at = self._clock.read_syslog(match.group(1))
        else:
            match = _SHORT_FULL.match(text)
            if match is None:
                return text
            at = self._clock.read_dated(match.group(1))
        if envelope.at is None:
            envelope.at = at
        return self._take_short(match, text, envelope)

    def _stern_prefix(self, text: str) -> str:
        """Pod and container before the line; empty if there are none."""
        match = _STERN.match(text)
        if match is not None:
            if len(self._sterns) < _PODS:
                self._sterns.add(match.group(1))
            return match.group(1)
        return next((pod for pod in self._sterns if text.startswith(pod)), "")

    def _take_short(self, match: re.Match[str], text: str, envelope: Envelope) -> str:
        envelope.process = match.group(3) or "kernel"
        envelope.pid = int(match.group(4)) if match.group(4) else None
        self._indent, self._indented = " " * match.end(), envelope
        return text[match.end() :]

    def _take_time(self, value: Any, envelope: Envelope) -> None:
        """The outermost time counts: it is the runtime's, and mostly has an offset."""
        at: float | None = None
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
            at = int(value) / 1e6  # the journal's microseconds
        elif isinstance(value, str):
            at = self._clock.read_dated(value)
        elif isinstance(value, int | float) and 0 < value < 1e11:
            at = float(value)
        if envelope.at is None and at is not None:
            envelope.at = at
            self._clock.note(at)


def _text_of(value: str | list[Any]) -> str | None:
    """The journal writes text that is no UTF-8 as a list of byte values."""
    if isinstance(value, str):
        return value
    if all(isinstance(item, int) and 0 <= item < 256 for item in value):
        return bytes(value).decode("utf-8", "replace")
    return None


def _string(value: Any) -> str | None:
    return (
        clean(value).replace("\n", " ").replace("\r", " ")[:100]
        if isinstance(value, str) and value
        else None
    )


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return (
        int(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12
        else None
    )
