"""Labels of a series: values made safe for every format, and written as text only once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

_MOST_CHARACTERS: Final = 128
_DIGEST_BYTES: Final = 4
_MOST_KEPT: Final = 4096
_UNFIT: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ESCAPED: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


class Labels:
    """Names and values in their order; those that are empty are left out."""

    __slots__ = ("_more", "pairs", "text")

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self.pairs = tuple((name, fit(cut_apart(value))) for name, value in pairs if value)
        inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in self.pairs)
        self.text = f"{{{inside}}}" if inside else ""
        self._more: dict[tuple[str, str], Labels] = {}

    def plus(self, name: str, value: str) -> Labels:
        """These and one more, out of few."""
        key = (name, cut_apart(value))
        found = self._more.get(key)
        if found is None:
            found = self._more[key] = Labels((*self.pairs, key))
        return found


class LabelCache:
    """The labels of subjects that were seen before; what is no longer there is forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, str], ...], Labels] = {}

    def get(self, values: Mapping[str, str | None]) -> Labels:
        """The labels of these names and values."""
        key = tuple((name, cut_apart(value or "")) for name, value in values.items())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            found = self._known[key] = Labels(key)
        return found


NONE: Final = Labels(())


def cut_apart(value: str) -> str:
    """A value that is not too long; two that differ stay different, or their series would be one.

    What was cut already stays as it is.
    """
    if len(value) <= _MOST_CHARACTERS:
        return value
    whole = value.encode("utf-8", "surrogatepass")
    end = "…" + hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).hexdigest()
    return value[: _MOST_CHARACTERS - len(end)] + end


def fit(value: str, longest: int = _MOST_CHARACTERS) -> str:
    """A value of one line or more that neither a page nor a terminal stumbles over."""
    if len(value) > longest:
        value = value[: longest - 1] + "…"
    return _UNFIT.sub("?", value)


def _escaped(value: str) -> str:
    return re.sub(r'[\\"\n]', lambda match: _ESCAPED[match[0]], value)
