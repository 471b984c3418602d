"""How a key is declared: a dataclass field that carries its kind and its sentence.

A field's name is the key plus the unit of its value: ``sampling_interval = "1s"`` in the file is
``sampling_interval_seconds = 1.0`` in the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from oomwatch.config.quantities import parse_duration
from oomwatch.config.values import Duration, Kind, Number, Size, Switch, ratio
from oomwatch.units import MIB, parse_size

Problem = tuple[str, str]
"""A key of a section, and the rest of a sentence that begins with the key's whole name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a section, as the loader and the texts see it."""

    name: str
    field: str
    kind: Kind
    default: Any
    doc: str
    example: str | None
    """What the example file shows where there is no default."""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A table inside a section; with `repeated` an array of tables."""

    name: str
    field: str
    cls: type[Any]
    doc: str
    repeated: bool


def members(cls: type[Any]) -> Iterator[Key | Section]:
    """The keys and the tables of a section's class, in their order."""
    for field in dataclasses.fields(cls):
        meta = field.metadata
        if "section" in meta:
            doc = meta["doc"] or " ".join((meta["section"].__doc__ or "").split())
            yield Section(
                meta["name"] or field.name, field.name, meta["section"], doc, meta["many"]
            )
        else:
            default = field.default
            if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            kind: Kind = meta["kind"]
            name = field.name.removesuffix(kind.suffix)
            yield Key(name, field.name, kind, default, meta["doc"], meta["example"])


def key(
    kind: Kind, default: Any, doc: str, example: str | None = None, *, secret: bool = False
) -> Any:
    """A key of any kind; one that may hold a secret stays out of the record's repr."""
    metadata = {"kind": kind, "doc": doc, "example": example}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, repr=not secret, metadata=metadata)
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def duration(default: str, doc: str, low: str = "1s", high: str = "366d") -> Any:
    """A time; the default and the bounds as they would be written."""
    bounds = Duration(parse_duration(low) or 0.0, parse_duration(high) or 0.0)
    return key(bounds, bounds.read(default, text=False), doc)


def size(default: str, doc: str, low: int = MIB, high: int = 2**62) -> Any:
    """A size; bounds in bytes."""
    return key(Size(low, high), parse_size(default), doc)


def share(default: float, doc: str) -> Any:
    """A ratio from 0 to 1."""
    return key(ratio(), default, doc)


def count(default: int, doc: str, low: int, high: int) -> Any:
    """A whole number."""
    return key(Number(low, high, whole=True), default, doc)


def rate(default: float, doc: str) -> Any:
    """A number whose key names its unit."""
    return key(Number(0.0, 1e6), default, doc)


def switch(default: bool, doc: str) -> Any:
    """True or false."""
    return key(Switch(), default, doc)


def section(cls: type[Any], doc: str = "") -> Any:
    """A table; without `doc` the docstring of its class documents it."""
    metadata = {"section": cls, "doc": doc, "name": None, "many": False}
    return dataclasses.field(default_factory=cls, metadata=metadata)


def sections(cls: type[Any], name: str, doc: str = "") -> Any:
    """An array of tables, written ``[[name]]``."""
    metadata = {"section": cls, "doc": doc, "name": name, "many": True}
    return dataclasses.field(default=(), metadata=metadata)
