"""What a server said that refused its command line, and which flag was probably meant."""

from __future__ import annotations

import re
from typing import Final

_PROGRAM: Final = re.compile(r"^(?:[\w./ -]{1,80}: )?[Ee]rror: ")
_FLAG: Final = re.compile(r"--[\w-]+")
_REFUSED: Final = re.compile(
    r"(?i)(?:unrecognized arguments?|no such option|unexpected argument)\b(.{1,400})"
)
_SENTENCE: Final = "The server refused its command line and loaded nothing"
_LONGEST: Final = 220


def refused_arguments(message: str, engine: str | None) -> str:
    """One sentence, with the flag that is nearest to one that no release has."""
    first = next((line.strip() for line in message.split("\n") if line.strip()), "")
    if not first:
        return f"{_SENTENCE}."
    near = nearest_flags(first, engine)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"{_SENTENCE}: {_PROGRAM.sub('', first)[:_LONGEST]}{hint}"


def nearest_flags(refused: str, engine: str | None) -> list[str]:
    """The flags that were probably meant by those that are refused and that no release has."""
    from oomwatch.engines.options import nearest_option  # noqa: PLC0415 - only where refused

    name = engine or ("sglang" if "sglang" in refused else "vllm")
    match = _REFUSED.search(refused)
    refused_flags = _FLAG.findall(match[1].replace("_", "-")) if match else []
    return [near for flag in refused_flags if (near := nearest_option(name, flag)) is not None]
