"""A page whose first part is made ahead, packed or not, and whose end is added for each answer."""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from oomwatch.export.text import Format

_LEVEL: Final = 1
"""Names repeat so much that even this makes a tenth of a page."""
_GZIP: Final = 16 + zlib.MAX_WBITS


class Form(NamedTuple):
    """How a page is asked for."""

    format: Format = "text"
    packed: bool = False
    """With gzip."""


class PageHead:
    """The first part of a page in one form; `with_end` may be called from any thread."""

    def __init__(self, text: bytes, *, packed: bool) -> None:
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP) if packed else None
        self._data = text
        if self._packer is not None:
            self._data = self._packer.compress(text) + self._packer.flush(zlib.Z_SYNC_FLUSH)

    def with_end(self, text: bytes) -> bytes:
        """The whole page; the end is packed as if it had been there with the rest."""
        if self._packer is None:
            return self._data + text
        packer = self._packer.copy()
        return self._data + packer.compress(text) + packer.flush()
