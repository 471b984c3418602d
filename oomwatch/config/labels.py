"""Labels: names and values that people give to hosts and engines, to route messages by."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LONGEST: Final = 200
_MOST: Final = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """A table of short texts; as text ``name=value,name=value``. Labels are never secret."""

    suffix: str = ""

    def read(self, value: object, *, text: bool) -> Mapping[str, str]:
        """Names and values."""
        if text and isinstance(value, str):
            value = _pairs(value)
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise ValueError('must be a table of texts, such as { team = "chat" }')
        if len(value) > _MOST:
            raise ValueError(f"must not have more than {_MOST} labels")
        for name, one in value.items():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"has the label {json.dumps(name[:64])}: a name is letters, digits and _"
                )
            if not one or len(one) > _LONGEST or not one.isprintable():
                raise ValueError(
                    f"has no fit value for the label {name}: write one line of at most {_LONGEST} "
                    "characters"
                )
        return dict(value)

    def show(self, value: Mapping[str, str]) -> str:
        """A table."""
        inside = ", ".join(
            f"{name} = {json.dumps(one, ensure_ascii=False)}" for name, one in value.items()
        )
        return f"{{ {inside} }}"


def _pairs(text: str) -> dict[str, str] | None:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        return None
    return {name.strip(): value.strip() for name, _, value in pairs}
