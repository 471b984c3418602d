"""Steps for a person: plain sentences that begin with a verb."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.records import Direction
from oomwatch.remedies.context import Context, Draft, Move


def act(
    id: str,  # noqa: A002 - named as the field of a remedy
    title: str,
    action: str,
    *,
    why: str = "",
    cost: str = "None.",
    direction: Direction | None = None,
    env: Mapping[str, str] | None = None,
) -> Move:
    """A step that only says what to do, in the words of its engine (see `Context.words`).

    ``{engine}`` becomes the engine's name.
    """

    def move(context: Context) -> Draft:
        named = {"engine": context.engine.fork or context.label}
        return Draft(
            id=id,
            title=context.words(title).format_map(named),
            why=context.words(why or title + ".").format_map(named),
            cost=cost,
            action=context.words(action).format_map(named),
            direction=direction,
            env=dict(env or {}),
        )

    return move


def upgrade(what: str, *, why: str = "", cost: str = "An upgrade to test.") -> Move:
    """Upgrade the engine to a release with (or without) something."""
    return act(
        "upgrade",
        "Upgrade {engine} to a newer version",
        "Upgrade {engine} to a newer version " + what,
        why=why or "This is fixed or bounded in later releases.",
        cost=cost,
    )


def upgrade_before(version: str, what: str, *, why: str = "") -> Move:
    """As `upgrade`, only for vLLM older than a release, for forks and for other engines."""
    step = upgrade(what, why=why)

    def move(context: Context) -> Draft | None:
        newer = context.name == "vllm" and context.version and context.at_least(version)
        return None if newer else step(context)

    return move


def unless_orphan(step: Move) -> Move:
    """A step that helps where another program holds the card, not where a dead server does."""
    return lambda context: None if context.finding.values.get("orphan") else step(context)


def on_engine(engine: str, step: Move) -> Move:
    """A step for one engine only."""
    return lambda context: step(context) if context.name == engine else None


def unless_engine(engine: str, step: Move) -> Move:
    """A step for every engine but one."""
    return lambda context: None if context.name == engine else step(context)


def where_measured(step: Move) -> Move:
    """A step that leaves the KV pool more room, as it is measured beside a step of full size.

    SGLang measures none: its pool is the share less the weights. Nor is a pool that was pinned.
    """
    return lambda c: None if c.name == "sglang" or c.pinned_kv else step(c)
