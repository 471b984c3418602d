"""Numbers, lengths and JSON out of the values of flags; a value that is none is wrong use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines import flags
from oomwatch.errors import UsageError
from oomwatch.memory.model_config import DTYPE_BYTES, ModelConfig

_MOST_RANKS: Final = 65536


class Numbers:
    """Numbers out of a mapping of flags; a text that is no number is wrong use."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def optional(self, flag: str) -> int | None:
        """A whole number, or None where the flag is absent."""
        value = self._values.get(flag)
        number = flags.as_number(value)
        if value is None or value is False:
            return None
        if number is None or not 0 <= number < 2**62:
            raise UsageError(f"{flag} {value} is not a usable number")
        return int(number)

    def integer(self, flag: str, otherwise: int) -> int:
        """A whole number, at least 1 unless 0 is the default."""
        number = self.optional(flag)
        if number == 0 and otherwise:
            raise UsageError(f"{flag} 0 does not start: it must be at least 1")
        return otherwise if number is None else number

    def ranks(self, flag: str) -> int:
        """A number of ranks; more than any cluster has is a typing mistake."""
        number = self.integer(flag, 1)
        if number > _MOST_RANKS:
            raise UsageError(f"{flag} {number} is more than any cluster has")
        return number

    def number(self, flag: str, otherwise: float) -> float:
        """A number that may have a fraction."""
        value = self._values.get(flag)
        if value is None:
            return otherwise
        number = flags.as_number(value)
        if number is None or not 0 <= number < 2**62:
            raise UsageError(f"{flag} {value} is not a usable number")
        return float(number)

    def share(self, flag: str, otherwise: float) -> float:
        """A share of the card: above 0, at most 1."""
        number = self.number(flag, otherwise)
        if not 0 < number <= 1:
            raise UsageError(f"{flag} {number:g} is not between 0 and 1")
        return number


def length_of(given: Any, model: ModelConfig) -> int:
    """A length in tokens; the model's own for None and ``auto``."""
    number = flags.as_number(given)
    if given is None or str(given) in ("auto", "-1"):
        return model.max_model_len
    if number is None or number < 1:
        raise UsageError(f"a length of {given} tokens is not usable")
    return int(number)


def json_of(value: Any) -> Mapping[str, Any]:
    """A JSON object in a flag; empty for anything else."""
    if not isinstance(value, str):
        return {}
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def text_of(value: Any) -> str | None:
    """A flag's text; None for a switch."""
    return value if isinstance(value, str) else None


def dtype_of(value: Any) -> int | None:
    """Bytes of one element of a named type; None for ``auto``."""
    return DTYPE_BYTES.get(str(value)) if value not in (None, "auto") else None


def count_of(value: Any) -> int:
    """A small count inside a JSON value; 0 for anything that is none."""
    number = flags.as_number(value)
    return int(number) if number is not None and 0 < number < 1e6 else 0


def size_of(flag: str, value: Any) -> int | None:
    """A size in bytes; None where none is given."""
    number = flags.as_number(value)
    if value is None:
        return None
    if number is None or not 0 < number < 2**62:
        raise UsageError(f"{flag} {value} is not a usable size in bytes")
    return int(number)
