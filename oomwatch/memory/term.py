"""A size with the interval it is expected in."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One share of the GPU, with the interval it is expected in."""

    bytes: int
    low: int
    high: int

    @classmethod
    def around(cls, value: float, relative: float, absolute: float = 0.0) -> Term:
        """A value with a relative and an absolute uncertainty."""
        spread = abs(value) * relative + absolute
        return cls(round(value), round(max(0.0, value - spread)), round(value + spread))

    @classmethod
    def exact(cls, value: float) -> Term:
        """A value that was read, not predicted."""
        return cls(round(value), round(value), round(value))

    def scaled(self, factor: float) -> Term:
        """The same share of another size."""
        return self if factor == 1 else Term(*(round(factor * size) for size in self.sizes))

    def at_most(self, limit: int) -> Term:
        """The term where there is room for no more than this."""
        return Term(*(min(size, max(0, limit)) for size in self.sizes))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The value and its interval."""
        return self.bytes, self.low, self.high
