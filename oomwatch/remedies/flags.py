"""From drafts to remedies: spelled for the version, checked against its table, free of conflict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from oomwatch.engines import flags, versions
from oomwatch.records import Direction, Remedy
from oomwatch.remedies.context import Context, Draft
from oomwatch.remedies.effects import effect_of, would_not_start
from oomwatch.remedies.sufficiency import sufficiency
from oomwatch.remedies.unknowns import without_guesses

MOST: Final = 7
"""Remedies of one finding: more than this nobody reads."""
_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def finish(draft: Draft, context: Context, direction: Direction) -> Remedy | None:
    """The remedy of a draft, or None where the version has no such flag or nothing would change."""
    draft = without_guesses(draft, context)
    written = _spelled(draft.set, context)
    if written is None:
        return None
    if written and not draft.unset and not draft.env and _changes_nothing(written, context):
        return None
    if would_not_start(draft.set, context, draft.unset):
        return None
    reason = _doubt(written, context)
    enough, short = sufficiency(draft.set, context, draft.unset)
    why = f"{draft.why} {short}".rstrip()
    named = bool(written or draft.unset)
    return Remedy(
        id=draft.id,
        title=draft.title,
        direction=draft.direction or direction,
        why=f"{why} Not validated: {reason}." if named and reason else why,
        cost=draft.cost,
        set=written,
        unset=draft.unset,
        env=draft.env,
        action=draft.action,
        effect=effect_of(draft.set, context, draft.unset),
        valid_for=_valid_for(context) if named else None,
        validated=named and reason is None,
        enough=enough,
    )


def compatible(remedies: Iterable[Remedy], force: Mapping[str, Any]) -> tuple[Remedy, ...]:
    """The remedies in their order, without any that fights or only repeats an earlier one."""
    kept: list[Remedy] = []
    ways: dict[str, set[int]] = {}
    unset: set[str] = set()
    for remedy in remedies:
        mine = {flag: way(flag, value, force) for flag, value in remedy.set.items()}
        fights = any(
            (-turn in ways.get(flag, ()) and turn) or flag in unset or _twin(flag) in ways
            for flag, turn in mine.items()
        ) or any(flag in ways or _twin(flag) in ways for flag in remedy.unset)
        # A second value of flags that an earlier step sets already says nothing of its own.
        again = bool(mine) and not (remedy.unset or remedy.env) and mine.keys() <= ways.keys()
        repeats = again or any(
            (other.set, other.unset, other.env, other.action)
            == (remedy.set, remedy.unset, remedy.env, remedy.action)
            or other.id == remedy.id
            for other in kept
        )
        if fights or repeats or len(kept) == MOST:
            continue
        kept.append(remedy)
        unset.update(remedy.unset)
        for flag, turn in mine.items():
            ways.setdefault(flag, set()).add(turn)
    return tuple(kept)


def way(flag: str, value: Any, force: Mapping[str, Any]) -> int:
    """Whether a value lies above (1) or below (-1) the one in force; 0 when that cannot be said."""
    new, old = flags.as_number(value), flags.as_number(force.get(flag))
    return 0 if new is None or old is None else (new > old) - (new < old)


def _twin(flag: str) -> str:
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else "--no-" + flag[2:]


def _spelled(wanted: Mapping[str, Any], context: Context) -> dict[str, Any] | None:
    """The settings as this version writes them; None where it lacks one of them.

    Where only a span of releases is known, as the newest of them writes that has them all. Where
    the version is not known, a spelling that the engine's own message has is preferred to others.
    """
    name = context.name or ""
    first, last = context.engine.version_since, context.engine.version_until
    if context.version is None and not context.is_fork and versions.sampled(name):
        printed = _printed(context)
        ways = list(_ways(name, first, last, wanted))
        best = max(ways, key=lambda written: len(printed & written.keys()), default=None)
        if first or last or (best is not None and printed & best.keys()):
            return best
    return _written(name, _spelling_version(context), wanted)


def _ways(
    name: str, first: str | None, last: str | None, wanted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """How the releases of a span write the settings, the newest that have them all first."""
    for release in reversed(versions.between(name, first, last)):
        at = ".".join(map(str, release))
        written = _written(name, at, wanted)
        if written is not None and not any(
            flags.check_flag(name, at, flag, value) for flag, value in written.items()
        ):
            yield written


def _printed(context: Context) -> frozenset[str]:
    """The options that stand in the lines a finding rests on."""
    texts = (evidence.text or "" for evidence in context.finding.evidence)
    return frozenset(flag for text in texts for flag in _FLAG.findall(text))


def _written(name: str, at: str | None, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    spelled = [flags.spell(name, at, flag, value) for flag, value in wanted.items()]
    return None if None in spelled else dict(filter(None, spelled))


def _spelling_version(context: Context) -> str | None:
    """The version whose spelling is used: outside the known releases the nearest of them."""
    at = versions.release(context.version)
    if at is None or not versions.sampled(context.name or ""):
        return None
    if versions.outside(context.name, context.version) is None:
        return context.version
    return ".".join(map(str, versions.standing_for(context.name or "", at)))


def _changes_nothing(written: Mapping[str, Any], context: Context) -> bool:
    """Whether every flag already has this value."""
    for flag, value in written.items():
        old = context.force.get(flag)
        number = flags.as_number(value)
        same = number == flags.as_number(old) if number is not None else str(value) == str(old)
        if not same:
            return False
    return True


def _doubt(written: Mapping[str, Any], context: Context) -> str | None:
    """Why the flags are not known to be valid; None when the tables vouch for them."""
    if context.is_fork:
        kind = context.engine.fork or context.engine.engine
        return f"{kind} is a fork, its flags are not in oomwatch's tables"
    outside = versions.outside(context.name, context.version)
    if outside is not None:
        return outside if context.version else f"{outside} (--engine-version)"
    for flag, value in written.items():
        fault = flags.check_flag(context.name or "", context.version, flag, value)
        if fault is not None:
            return fault
    return None


def _valid_for(context: Context) -> str | None:
    name = context.engine.fork or context.engine.engine
    return f"{name} {context.engine.version}" if name and context.engine.version else name
