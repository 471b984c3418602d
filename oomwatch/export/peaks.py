"""Maxima since whoever asks has asked before: two who ask do not take them from each other."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

_KEPT_SECONDS: Final = 300.0
_MOST_KEPT: Final = 3000
_MOST_ASKING: Final = 16

_Key = TypeVar("_Key", bound=Hashable)


class Peaks(Generic[_Key]):
    """Values of the last five minutes, by what they are of. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: collections.deque[tuple[float, Mapping[_Key, float]]] = collections.deque(
            maxlen=_MOST_KEPT
        )
        self._asked: collections.OrderedDict[str, float] = collections.OrderedDict()

    def add(self, now: float, values: Mapping[_Key, float]) -> None:
        """Take values of monotonic time `now`."""
        with self._lock:
            self._seen.append((now, values))
            while now - self._seen[0][0] > _KEPT_SECONDS:
                self._seen.popleft()

    def since_last(self, asking: str, now: float) -> dict[_Key, float]:
        """The highest values since `asking` has asked before; the last ones are always among them.

        What is not among the last values is gone and left out.
        """
        with self._lock:
            since = self._asked.pop(asking, float("-inf"))
            self._asked[asking] = now
            if len(self._asked) > _MOST_ASKING:
                self._asked.popitem(last=False)
            if not self._seen:
                return {}
            found = dict(self._seen[-1][1])
            for at, values in reversed(self._seen):
                if at <= since:
                    break
                for key in found.keys() & values.keys():
                    found[key] = max(found[key], values[key])
            return found
