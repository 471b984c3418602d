"""A plan: the direction a cause asks for, and its steps in order."""

from __future__ import annotations

from oomwatch.records import Direction
from oomwatch.remedies.context import Move


class Plan:
    """Steps in order; those that do not apply to the engine, version or numbers are left out."""

    __slots__ = ("direction", "moves")

    def __init__(self, direction: Direction, *moves: Move) -> None:
        self.direction = direction
        self.moves = moves
