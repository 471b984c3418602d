"""Reads `journalctl -o export`: records of ``FIELD=value`` lines with an empty line between.

A value with control characters (colours, carriage returns) or line feeds is written as the bare
field name, then a line feed, eight bytes of little-endian length, the bytes and a line feed::

    __REALTIME_TIMESTAMP=1741238955896764
    _PID=72702
    MESSAGE=[2025-03-06 05:29:15] Init torch distributed begin.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_BARE_NAME = re.compile(rb"[A-Z_][A-Z0-9_]{0,63}")
_MAX_VALUE = 16 << 20  # a longer value is taken for a broken record


@dataclasses.dataclass(slots=True)
class Record:
    """The parts of one journal record that a log line needs."""

    messages: list[tuple[int, bytes]]
    """Line number and bytes of each line of MESSAGE."""
    fields: dict[bytes, bytes]


def is_export(head: bytes) -> bool:
    """Whether a file that starts so is an export."""
    return head.lstrip(b"\r\n").startswith((b"__CURSOR=", b"__REALTIME_TIMESTAMP="))


class ExportParser:
    """Takes lines one by one and gives records as they end."""

    _WANTED = (b"__REALTIME_TIMESTAMP", b"_PID", b"SYSLOG_IDENTIFIER", b"_COMM", b"_TRANSPORT")

    def __init__(self) -> None:
        self._record = Record([], {})
        self._name: bytes | None = None  # of the binary value being read
        self._value: list[bytes] = []
        self._number = 0
        self._size = 0
        self._lost = False

    def reset(self) -> None:
        """Forget a record that was begun: lines were left out.

        What follows may be the middle of a message, so nothing counts until a record begins.
        """
        self._record, self._name, self._lost = Record([], {}), None, True

    def feed(self, number: int, data: bytes, size: int) -> Iterator[Record]:
        """Take one line; `size` is its full length where `data` was cut."""
        if self._lost:
            self._lost = not data.startswith(b"__CURSOR=")
        elif self._name is not None:
            self._feed_binary(data, size)
        elif not data.rstrip(b"\r"):
            yield from self.finish()
        elif b"=" in data:
            name, _, value = data.partition(b"=")
            self._store(name, value, number)
        elif _BARE_NAME.fullmatch(data):
            self._name, self._value, self._number, self._size = data, [], number + 1, 0

    def finish(self) -> Iterator[Record]:
        """The record that was begun, at an empty line or the end of the file."""
        record, self._record = self._record, Record([], {})
        if record.messages:
            yield record

    def _feed_binary(self, data: bytes, size: int) -> None:
        self._value.append(data)
        self._size += size + 1
        if self._size <= 8:
            return
        whole = b"\n".join(self._value[:2]) if len(self._value[0]) < 8 else self._value[0]
        length = int.from_bytes(whole[:8], "little")
        if length > _MAX_VALUE:
            self.reset()
        elif self._size - 1 >= 8 + length:
            name, value = self._name or b"", b"\n".join(self._value)
            self._store(name, value[8 : 8 + length], self._number + value[:8].count(b"\n"))
            self._name, self._value = None, []

    def _store(self, name: bytes, value: bytes, number: int) -> None:
        if name == b"MESSAGE":
            lines = value.split(b"\n")
            self._record.messages.extend(enumerate(lines, number))
        elif name in self._WANTED:
            self._record.fields[name] = value[:200]
