"""The kinds of values of a configuration: what may be written, what it becomes, how it is shown.

A kind reads what TOML gives, or the text of an environment variable or flag, and raises ValueError
with the rest of a sentence that begins with the key: ``needs a unit: write "30s", not 30``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

from oomwatch.config.quantities import parse_duration, show_duration, show_size
from oomwatch.units import parse_size

_BARE: Final = re.compile(r"[+-]?\d+(?:\.\d*)?")
_SWITCHES: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_LIKE_A_SECRET: Final = re.compile(r"xox[a-z]-.*|whsec_.*|(?=.*\d)[A-Za-z0-9]{32,}")
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]*(?=@)")
_CREDENTIAL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
HIDDEN: Final = "***"


class Kind(Protocol):
    """What a key takes."""

    @property
    def suffix(self) -> str:
        """What the field's name adds to the key to say its unit; may be empty."""

    def read(self, value: object, *, text: bool) -> Any:
        """The value in the units of the program; with `text` it comes as text only."""

    def show(self, value: Any) -> str:
        """The value as it would be written in the file, secrets left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Duration:
    """A time with its unit, between `low` and `high` seconds."""

    low: float
    high: float
    suffix: str = "_seconds"

    def read(self, value: object, *, text: bool) -> float:  # noqa: ARG002 - text in both cases
        """Seconds."""
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is None:
            raise ValueError(_wants_unit(value, "a duration", ("30s", "5min", "2h", "s")))
        if not self.low <= seconds <= self.high:
            low, high = show_duration(self.low), show_duration(self.high)
            raise ValueError(f'must be between "{low}" and "{high}", not {_shown(value)}')
        return seconds

    def show(self, value: float) -> str:
        """Quoted, with the largest unit that fits."""
        return f'"{show_duration(value)}"'


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A size with its unit, between `low` and `high` bytes."""

    low: int
    high: int
    suffix: str = "_bytes"

    def read(self, value: object, *, text: bool) -> int:  # noqa: ARG002 - text in both cases
        """Bytes."""
        bare = not isinstance(value, str) or _BARE.fullmatch(value.strip())
        size = None if bare else parse_size(str(value))
        if size is None:
            raise ValueError(_wants_unit(value, "a size", ("512MiB", "2GiB", "100KiB", "MiB")))
        if not self.low <= size <= self.high:
            low, high = show_size(self.low), show_size(self.high)
            raise ValueError(f'must be between "{low}" and "{high}", not {_shown(value)}')
        return size

    def show(self, value: int) -> str:
        """Quoted, with the largest binary unit that fits."""
        return f'"{show_size(value)}"'


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A bare number: a share from 0 to 1, or a count or rate whose key names the unit."""

    low: float
    high: float
    whole: bool = False
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> float:
        """An int with `whole`, else a float."""
        number = _number(value) if text and isinstance(value, str) else value
        noun = "a whole number" if self.whole else "a number"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"must be {noun}, not {_shown(value)}")  # noqa: TRY004 - a bad value
        if self.whole and number != int(number if math.isfinite(number) else 0):
            raise ValueError(f"must be {noun}, not {_shown(value)}")
        if not self.low <= number <= self.high:
            hint = ""
            if self.high == 1 and 1 < number <= 100:
                hint = f"; {number:g} % is {number / 100:g}"
            raise ValueError(
                f"must be {noun} from {self.low:g} to {self.high:g}, not {_shown(value)}{hint}"
            )
        return int(number) if self.whole else float(number)

    def show(self, value: float) -> str:
        """As TOML writes it."""
        return repr(value)


def ratio() -> Number:
    """A share from 0 to 1."""
    return Number(0.0, 1.0, suffix="_ratio")


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    """true or false."""

    suffix: str = ""

    def read(self, value: object, *, text: bool) -> bool:
        """A bool; as text also yes, no, on, off, 1, 0."""
        if isinstance(value, bool):
            return value
        if text and isinstance(value, str) and value.strip().lower() in _SWITCHES:
            return _SWITCHES[value.strip().lower()]
        raise ValueError(f"must be true or false, not {_shown(value)}")

    def show(self, value: bool) -> str:
        """As TOML writes it."""
        return "true" if value else "false"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One word of several."""

    options: tuple[str, ...]
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> str:  # noqa: ARG002 - text in both cases
        """The word, in lower case."""
        word = value.strip().lower() if isinstance(value, str) else None
        if word not in self.options:
            options = ", ".join(f'"{option}"' for option in self.options)
            raise ValueError(f"must be one of {options}, not {_shown(value)}")
        return word

    def show(self, value: str) -> str:
        """Quoted."""
        return json.dumps(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """A list of words out of several; as text separated by commas."""

    options: tuple[str, ...]
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> tuple[str, ...]:
        """The words, each once, in their order."""
        if text and isinstance(value, str):
            value = [word for word in re.split(r"""[,\s\[\]"']+""", value) if word]
        if not isinstance(value, list):
            raise ValueError(f"must be a list, not {_shown(value)}")  # noqa: TRY004 - a bad value
        choice = Choice(self.options)
        return tuple(dict.fromkeys(choice.read(word, text=text) for word in value))

    def show(self, value: tuple[str, ...]) -> str:
        """A list."""
        return json.dumps(list(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text on one line that matches `pattern`; `example` says what it looks like."""

    pattern: str = r"[^\n]+"
    example: str = ""
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> str:  # noqa: ARG002 - text in both cases
        """The text without blanks around it."""
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {_shown(value)}")  # noqa: TRY004 - a bad value
        line = value.strip()
        example = json.dumps(self.example, ensure_ascii=False) if self.example else ""
        if not line or not line.isprintable():
            like = f", such as {example}" if example else ""
            raise ValueError(f"must be one line of text{like}, not {_shown(value)}")
        if not re.fullmatch(self.pattern, line):
            raise ValueError(f"must look like {example}, not like {_shown(value)}")
        return line

    def show(self, value: str) -> str:
        """Quoted."""
        return json.dumps(value, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """A list of texts that each match `pattern`; as text separated by commas, or as JSON has it."""

    pattern: str
    example: str
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> tuple[str, ...]:
        """The texts, each once, in their order."""
        if text and isinstance(value, str):
            value = _list_in(value)
        if not isinstance(value, list):
            raise ValueError(f"must be a list, not {_shown(value)}")  # noqa: TRY004 - a bad value
        one = Text(self.pattern, self.example)
        return tuple(dict.fromkeys(one.read(word, text=text) for word in value))

    def show(self, value: tuple[str, ...]) -> str:
        """A list."""
        return json.dumps(list(value), ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FilePath:
    """An absolute path; ``~/`` is the home of whoever runs the program."""

    secret: bool = False
    """Whether the file holds a secret: then a bare name is a systemd credential."""
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> str:
        """The path, as text."""
        path = Text(example="/run/secrets/name" if self.secret else "/srv/log").read(
            "" if self.secret and not isinstance(value, str) else value, text=text
        )
        if path.startswith("~/"):
            path = str(Path(path).expanduser())
        if self.secret and _LIKE_A_SECRET.fullmatch(path):
            raise ValueError(
                "seems to be the secret itself: put it into a file, and give the file's absolute "
                "path here"
            )
        if self.secret and _CREDENTIAL.fullmatch(path):
            return path
        if self.secret and not path.startswith("/"):  # the message does not repeat a secret
            raise ValueError(
                "must be the absolute path of a file, or the bare name of a systemd credential"
            )
        if not path.startswith("/"):
            raise ValueError(f"must be an absolute path, not {_shown(value)}")
        return path

    def show(self, value: str) -> str:
        """Quoted."""
        return json.dumps(value, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Url:
    """A URL of one of the schemes, with a host."""

    schemes: tuple[str, ...]
    example: str
    suffix: str = ""

    def read(self, value: object, *, text: bool) -> str:
        """The URL as it was written."""
        url = Text(example=self.example).read(value, text=text)
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018 - raises ValueError for a port that is none
        except ValueError:
            parts = None
        # SQLite's and a local PostgreSQL's URLs have no host.
        needs_host = parts is not None and parts.scheme.startswith("http")
        if parts is None or parts.scheme not in self.schemes or (needs_host and not parts.hostname):
            raise ValueError(f"must be a URL such as {json.dumps(self.example)}")
        return url

    def show(self, value: str) -> str:
        """Quoted, without its password and the values of its query."""
        return json.dumps(hide_url(value), ensure_ascii=False)


def url_has_secret(url: str) -> bool:
    """Whether a URL carries a password, a token before ``@`` or one in its query."""
    return hide_url(url) != url


def hide_url(url: str) -> str:
    """The URL with ``***`` for its password and for the values of its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    place = parts.netloc
    login, at, host = place.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        # Without a colon the one word may be a token, except where a database takes a user alone.
        is_user = colon or not parts.scheme.startswith("http")
        place = f"{user if is_user else HIDDEN}{colon and ':' + HIDDEN}@{host}"
    query = re.sub(r"=[^&]*", f"={HIDDEN}", parts.query)
    # SQLite's URLs begin with three slashes, which urlunsplit would take for none.
    if not place and "://" in url:
        return f"{parts.scheme}://{parts.path}{'?' + query if query else ''}"
    return urlunsplit((parts.scheme, place, parts.path, query, parts.fragment))


def _list_in(text: str) -> list[object]:
    """``a, b`` or ``["a", "b"]``; an address such as ``[::1]:80`` is no list."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        value = None
    if isinstance(value, list):
        return value
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _wants_unit(value: object, noun: str, examples: tuple[str, ...]) -> str:
    """Say what is wrong with a duration or size; a bare number gets its likely text."""
    number = value.strip() if isinstance(value, str) else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number or (isinstance(number, str) and _BARE.fullmatch(number)):
        return f'needs a unit: write "{number}{examples[-1]}" or the like, not {_shown(value)}'
    likes = ", ".join(f'"{one}"' for one in examples[:-1])
    return f"must be {noun} with a unit, such as {likes}, not {_shown(value)}"


def _shown(value: object) -> str:
    """A wrong value in a message: short, on one line."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)  # dates and times of TOML
    text = "".join(char if char.isprintable() else "?" for char in text)
    text = _PASSWORD.sub(HIDDEN, text)
    return text if len(text) <= 60 else f"{text[:59]}…"
