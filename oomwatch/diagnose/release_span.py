"""Between which releases a version lies that no line names: each line and file has its span.

A log that was cut above often shows only a traceback and a few figures. What matched was printed,
or stood, in known releases only; a flag that none of them accepts is no remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from oomwatch.diagnose.runs import Run
from oomwatch.engines import versions
from oomwatch.engines.vllm.code import GENERATIONS, PLACES


def release_span(
    run: Run | None, engine: str | None, generation: str | None
) -> tuple[str | None, str | None]:
    """The oldest and the newest release that print all that this run shows; None where open.

    Contradictory spans say nothing: a fork, or a log of two releases.
    """
    if run is None or engine not in ("vllm", "sglang"):
        return None, None
    return versions.common_span({*_spans(run, engine), GENERATIONS.get(generation or "", "..")})


def generation_of_code(run: Run) -> str | None:
    """The generation of vLLM by the files that its failures went through; None where they disagree."""
    found = {
        place.generation
        for path in _paths(run)
        for place in PLACES
        if place.generation is not None and place.pattern.search(path)
    }
    return found.pop() if len(found) == 1 else None


def _spans(run: Run, engine: str) -> Iterator[str]:
    patterns = [event.pattern for event in run.events]
    patterns += [pattern for failure in run.failures for pattern, _ in failure.matches]
    yield from (pattern.span for pattern in patterns if pattern.id.startswith(f"{engine}."))
    if engine == "vllm":
        for path in _paths(run):
            yield from (place.span for place in PLACES if place.pattern.search(path))


def _paths(run: Run) -> Iterator[str]:
    for failure in run.failures:
        yield from failure.paths
