"""Releases as tuples: reading, comparing, and which sampled release speaks for which version."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

Release = tuple[int, int, int]
T = TypeVar("T")

_RELEASE: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_UNTAGGED: Final = re.compile(r"^v?0\.(?:0|1)\.(?:0\.)?dev")  # a checkout without tags


def release(text: object) -> Release | None:
    """A version text as (major, minor, micro): ``v0.6.6.post1`` is (0, 6, 6); None if unreadable."""
    match = _RELEASE.search(str(text or "")[:200])
    if match is None:
        return None
    major, minor, micro = match.groups()
    return int(major), int(minor), int(micro or 0)


def at_least(version: str | None, floor: str) -> bool | None:
    """Whether a version is `floor` or newer; None when the version is unknown."""
    mine = release(version)
    return None if mine is None else mine >= _known_release(floor)


def latest(by_release: Mapping[str, T], at: Release) -> T | None:
    """The value of the newest release not newer than `at`: values hold until the next entry."""
    held = [(known, key) for key in by_release if (known := release(key)) and known <= at]
    return by_release[max(held)[1]] if held else None


def span_holds(span: str, at: Release) -> bool:
    """Whether ``0.5.5..0.5.15`` (both ends belong to it), or a single release, covers `at`."""
    first, _, last = span.partition("..")
    return _known_release(first) <= at <= _known_release(last or first)


def common_span(spans: Iterable[str]) -> tuple[str | None, str | None]:
    """The releases that lie in all of these spans, ends as in the text; None for an open end.

    Both are None where the spans have no release in common.
    """
    ends = [span.partition("..") for span in spans]
    since = max((first for first, _, _ in ends if first), key=_known_release, default=None)
    last = [end or ("" if dots else first) for first, dots, end in ends]
    until = min(filter(None, last), key=_known_release, default=None)
    if since and until and _known_release(since) > _known_release(until):
        return None, None
    return since, until


@functools.cache
def table(engine: str) -> Mapping[str, Any]:
    """The flag table of `vllm` or `sglang`: ``releases`` and ``flags``, read on first use."""
    # pathlib instead of importlib.resources: that takes 7 ms to import, in every command
    path = pathlib.Path(__file__).parent / "data" / f"{engine}_flags.json"
    loaded: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@functools.cache
def sampled(engine: str) -> tuple[Release, ...]:
    """The releases whose sources were read, oldest first; empty for engines without a table."""
    if engine not in ("vllm", "sglang"):
        return ()
    return tuple(sorted({_known_release(text) for text in table(engine)["releases"]}))


def between(engine: str, since: str | None, until: str | None) -> tuple[Release, ...]:
    """The sampled releases from `since` to `until`, oldest first; None: open. Never empty."""
    first, last = release(since), release(until)
    found = [
        at
        for at in sampled(engine)
        if (first is None or first <= at) and (last is None or at <= last)
    ]
    return tuple(found) or (standing_for(engine, last or sampled(engine)[-1]),)


def standing_for(engine: str, version: Release) -> Release:
    """The sampled release that speaks for a version: the newest that is not newer, or the oldest."""
    known = sampled(engine)
    return max((each for each in known if each <= version), default=min(known))


def newest(engine: str) -> str:
    """The newest sampled release, as text."""
    return ".".join(map(str, sampled(engine)[-1]))


def outside(engine: str | None, version: str | None) -> str | None:
    """Why the tables cannot vouch for this version, or None when they can."""
    if not sampled(engine or ""):
        return f"the flags of {engine or 'this engine'} are not in oomwatch's tables"
    mine = release(version)
    if mine is None or _UNTAGGED.match(str(version)):
        return f"the version of {engine} is not known"
    known = sampled(engine or "")
    if mine < known[0] or mine[:2] > known[-1][:2]:
        return f"{engine} {version} is outside the releases oomwatch knows ({_span(known)})"
    return None


def _span(known: Iterable[Release]) -> str:
    first, *_, last = known
    return f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"


def _known_release(text: str) -> Release:
    found = release(text)
    if found is None:
        raise ValueError(f"not a release: {text}")
    return found
