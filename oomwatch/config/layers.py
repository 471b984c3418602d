"""The layers of a configuration: what each one says of which key, before values are read.

A setting is known by its path: ``("agent", "sampling_interval")``, ``("engine", "0", "port")``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from oomwatch.config.fields import Key, Section, members
from oomwatch.config.schema import SCHEMA_VERSION, Config

KeyPath = tuple[str, ...]
PREFIX: Final = "OOMWATCH_"

_MOST_ENGINES: Final = 256
_PLAIN: Final = re.compile(r"[\w.-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: the file's path, the variable's or the flag's name."""

    layer: Literal["default", "file", "environment", "flag"]
    where: str | None = None

    def __str__(self) -> str:
        """For people."""
        return self.where or self.layer


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given; with `text` it is text whatever the key wants."""

    value: object
    origin: Origin
    text: bool = False


@dataclasses.dataclass(slots=True)
class Layers:
    """The settings of all layers read so far, later ones in place of earlier ones."""

    settings: dict[KeyPath, Setting] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def called(self, path: KeyPath) -> str:
        """A path for a message."""
        given = self.settings.items()
        return called(path, {one: setting.value for one, setting in given if one[-1] == "name"})


def parse_toml(data: bytes, path: Path) -> dict[str, Any] | str:
    """The tables of a file, or one line that says where it is no TOML."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        return f"{path}: is not UTF-8 (at line {line}, column {column})"
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        if "at end of document" in message:
            lines = text.splitlines() or [""]
            place = f"at line {len(lines)}, column {len(lines[-1]) + 1}"
            message = message.replace("at end of document", f"{place}, the end of the file")
        return f"{path}: {message[:1].lower()}{message[1:]}"
    except RecursionError:
        return f"{path}: is nested too deeply"


def add_file(layers: Layers, document: Mapping[str, Any], path: Path) -> None:
    """The layer of the file."""
    tables = dict(document)
    version = tables.pop("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        advice = "upgrade oomwatch" if isinstance(version, int) and version > 1 else "write 1"
        layers.errors.append(
            f"{path}: schema_version must be {SCHEMA_VERSION} for this oomwatch; {advice}"
        )
    origin = Origin("file", str(path))
    _flatten(layers, Config, tables, (), origin)


def _flatten(
    layers: Layers, cls: type[Any], table: Mapping[str, Any], path: KeyPath, origin: Origin
) -> None:
    known = {member.name: member for member in members(cls)}
    # The name first: messages about the other keys say it.
    for name, value in sorted(table.items(), key=lambda item: item[0] != "name"):
        here = (*path, name)
        member = known.get(name)
        if member is None:
            layers.unknown.append(f"{origin}: {layers.called(here)} is not known{suggest(here)}")
        elif isinstance(member, Key):
            layers.settings[here] = Setting(value, origin)
        elif member.repeated:
            if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
                layers.errors.append(
                    f"{origin}: {dotted(here)} must be written [[{dotted(here)}]], once for each"
                )
                continue
            for index, one in enumerate(value):
                _flatten(layers, member.cls, one, (*here, str(index)), origin)
        elif isinstance(value, dict):
            _flatten(layers, member.cls, value, here, origin)
        else:
            layers.errors.append(
                f"{origin}: {dotted(here)} must be a table, written [{dotted(here)}]"
            )


def add_environment(layers: Layers, environ: Mapping[str, str]) -> None:
    """The layer of ``OOMWATCH_SECTION__KEY``; variables of another form are not settings."""
    single = {PREFIX + "_".join(path).upper(): path for path, _ in all_keys()}
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX):
            continue
        rest = name.removeprefix(PREFIX)
        if "__" not in rest:
            if name in single:
                right = PREFIX + "__".join(single[name]).upper()
                layers.unknown.append(f"{name} is not known; did you mean {right}?")
            continue
        _add_text(layers, tuple(rest.lower().split("__")), value, Origin("environment", name))


def add_overrides(layers: Layers, overrides: Mapping[str, object]) -> None:
    """The layer of flags: dotted keys with values as TOML has them, or as text."""
    for name, value in overrides.items():
        origin = Origin("flag", f"flag for {name}")
        path = tuple(name.split("."))
        if isinstance(value, str):
            _add_text(layers, path, value, origin)
        elif find_key(path) is None:
            layers.unknown.append(f"{origin}: {name} is not known{suggest(path)}")
        else:
            layers.settings[path] = Setting(value, origin)


def _add_text(layers: Layers, path: KeyPath, value: str, origin: Origin) -> None:
    if find_key(path) is None:
        layers.unknown.append(f"{origin}: {dotted(path)} is not known{suggest(path)}")
    else:
        layers.settings[path] = Setting(value, origin, text=True)


def find_key(path: KeyPath) -> Key | None:
    """The key at a path, through sections and numbered tables; None if there is none."""
    cls: type[Any] = Config
    parts = list(path)
    while parts:
        name = parts.pop(0)
        member = next((one for one in members(cls) if one.name == name), None)
        if isinstance(member, Key):
            return member if not parts else None
        if member is None:
            return None
        if member.repeated and not (parts and _is_index(parts.pop(0))):
            return None
        cls = member.cls
    return None


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text[:6]) < _MOST_ENGINES


def all_keys(cls: type[Any] = Config, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Key]]:
    """Every key with its path; those of repeated tables once, without a number."""
    for member in members(cls):
        if isinstance(member, Section):
            yield from all_keys(member.cls, (*path, member.name))
        else:
            yield (*path, member.name), member


def dotted(path: KeyPath) -> str:
    """A path as people write it."""
    return ".".join(path)


def called(path: KeyPath, names: Mapping[KeyPath, object]) -> str:
    """A path for a message: tables of which there are several go by their names too.

    ``notify.slack.6 (oncall).channel``; `names` are the values of their keys ``name``, by path.
    """
    parts = list(path)
    for end, part in enumerate(path, 1):
        name = str(names.get((*path[:end], "name"), ""))
        if part.isdigit() and _PLAIN.fullmatch(name):
            parts[end - 1] = f"{part} ({name})"
    return dotted(tuple(parts))


def suggest(path: KeyPath) -> str:
    """What was probably meant instead of an unknown key, as the rest of the sentence."""
    in_file = (*path[:-1], f"{path[-1]}_file")
    if find_key(in_file) is not None:  # a secret, which is not written here
        return f"; name a file that holds it as {in_file[-1]}"
    plain = dotted(tuple(part for part in path if not part.isdigit()))
    sections = {dotted(one[:end]) for one, _ in all_keys() for end in range(1, len(one))}
    names = [*(dotted(one) for one, _ in all_keys()), *sections]
    # A right word in the wrong section is nearer than a similar whole.
    same = [name for name in names if name.rpartition(".")[2] == path[-1]]
    near = same if len(same) == 1 else difflib.get_close_matches(plain, names, n=1, cutoff=0.75)
    if not near and path[0] not in sections:
        near = difflib.get_close_matches(path[0], sorted(sections), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""
