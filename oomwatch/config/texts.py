"""The configuration as text: the example file, the reference, what is in force."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomwatch.config.fields import Key, Section, members
from oomwatch.config.labels import Labels
from oomwatch.config.layers import PREFIX, KeyPath, Origin, dotted
from oomwatch.config.schema import SCHEMA_VERSION, Config
from oomwatch.config.values import hide_url, url_has_secret

_WIDTH: Final = 92

_HEAD: Final = """\
# The configuration of oomwatch, with every key and its default: take away the # of what you change.
#
# Read from /etc/oomwatch/config.toml, else $XDG_CONFIG_HOME/oomwatch/config.toml.
# Times and sizes have units: "500ms", "30s", "5min", "2h", "7d"; "512MiB", "2GiB".
# Every key is also a variable, OOMWATCH_SECTION__KEY, which wins over this file:
# OOMWATCH_DETECT__KV_SATURATION__WARN=0.95, OOMWATCH_ENGINE__0__PORT=8000.
# `oomwatch config check` checks it; `systemctl reload oomwatch` takes it over.
"""


def example_toml() -> str:
    """The example file: every key with its default, commented out."""
    lines = [_HEAD, f"schema_version = {SCHEMA_VERSION}"]
    said: set[str] = set()
    for path, section, own, like in _told_once():
        lines += ["", *_comment(section.doc)]
        if like is not None:
            lines += _comment(f"It also takes the keys that all receivers share: see {like}.")
        lines.append(f"#[[{dotted(path)}]]" if section.repeated else f"[{dotted(path)}]")
        for key in own:
            if key.doc not in said:  # `mode` is the same in every rule
                lines += _comment(key.doc)
            said.add(key.doc)
            lines.append(f"#{key.name} = {_shown_default(key)}")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The tables of the reference: each key with its default and what it means, as Markdown."""
    lines: list[str] = []
    for path, section, own, like in _told_once():
        name = dotted(path)
        lines += [
            f"### `{f'[[{name}]]' if section.repeated else f'[{name}]'}`",
            "",
            section.doc,
            "",
        ]
        if like is not None:
            lines += [f"It also takes the keys that all receivers share: see `{like}`.", ""]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        for key in own:
            default = "not set" if not _has_default(key) else f"`{key.kind.show(key.default)}`"
            lines.append(f"| `{key.name}` | {default} | {key.doc} |")
        lines.append("")
    return "\n".join(lines)


def _told_once() -> Iterator[tuple[KeyPath, Section, list[Key], str | None]]:
    """Every table with the keys to describe there; what receivers share is told at the first.

    The last is that other table, if there is one. A name is always told: it must be given.
    """
    told: dict[type[Any], str] = {}
    for path, section in sections():
        above = section.cls.__mro__[1:] if section.repeated else ()
        bases = [base for base in above if dataclasses.is_dataclass(base)]
        known = [base for base in bases if base in told]
        shared = {field.name for base in known for field in dataclasses.fields(base)}
        own = [key for key in keys(section.cls) if key.name == "name" or key.field not in shared]
        for base in bases:
            told.setdefault(base, f"[[{dotted(path)}]]")
        yield path, section, own, told[known[0]] if known else None


def sections(cls: type[Any] = Config, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Section]]:
    """Every table that holds keys, in the order of the file."""
    for member in members(cls):
        if isinstance(member, Section):
            here = (*path, member.name)
            if any(keys(member.cls)):
                yield here, member
            yield from sections(member.cls, here)


def keys(cls: type[Any]) -> Iterator[Key]:
    """The keys of a section itself."""
    return (member for member in members(cls) if isinstance(member, Key))


def _has_default(key: Key) -> bool:
    return key.default is not None and key.default != {}


def _shown_default(key: Key) -> str:
    if key.example is not None and not key.default:
        return key.example
    shown: str = key.kind.show(key.default) if _has_default(key) else '""'
    return shown


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False)]


def in_force(config: Config) -> Iterator[tuple[KeyPath, Key, Any]]:
    """Every key of a configuration with its value, those of each engine by its number."""
    yield from _values(config, ())


def _values(section: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Key, Any]]:
    inside: list[tuple[KeyPath, Any]] = []
    for member in members(type(section)):
        value, here = getattr(section, member.field), (*path, member.name)
        if isinstance(member, Key):
            yield here, member, value
        elif member.repeated:
            inside += [((*here, str(number)), one) for number, one in enumerate(value)]
        else:
            inside.append((here, value))
    for here, one in inside:
        yield from _values(one, here)


def merged_toml(config: Config, origins: Mapping[str, Origin]) -> str:
    """What is in force, as TOML with the origin of each value; secrets are hidden."""
    lines = [f"schema_version = {SCHEMA_VERSION}"]
    above: KeyPath = ()
    for path, key, value in in_force(config):
        if path[:-1] != above:
            above = path[:-1]
            lines += ["", _heading(above)]
        origin = origins[dotted(path)]
        if value is None or value == {}:
            lines.append(f"# {key.name} is not set")
        else:
            lines.append(f"{key.name} = {key.kind.show(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _heading(path: KeyPath) -> str:
    return f"[[{dotted(path[:-1])}]]" if path[-1].isdigit() else f"[{dotted(path)}]"


def merged_json(config: Config, origins: Mapping[str, Origin]) -> list[dict[str, Any]]:
    """What is in force, one entry a key, in the units of the program; secrets are hidden."""
    entries = []
    for path, key, value in in_force(config):
        origin = origins[dotted(path)]
        entries.append(
            {
                "key": dotted(path),
                "value": _plain(key, value),
                "unit": {"_seconds": "seconds", "_bytes": "bytes", "_ratio": "ratio"}.get(
                    key.kind.suffix
                ),
                "text": None if value is None else key.kind.show(value),
                "origin": origin.layer,
                "where": origin.where,
                "variable": PREFIX + "__".join(path).upper(),
            }
        )
    return entries


def _plain(key: Key, value: Any) -> Any:
    if isinstance(key.kind, Labels):
        return dict(value)
    if isinstance(value, Mapping):
        return dict.fromkeys(value, "***")
    if isinstance(value, str) and "://" in value and url_has_secret(value):
        return hide_url(value)
    return list(value) if isinstance(value, tuple) else value
