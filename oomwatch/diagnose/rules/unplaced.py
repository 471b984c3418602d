"""What remains to be said of a refused allocation when its place in the engine is missing."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.frames import find_part, find_stage, telling_frame
from oomwatch.diagnose.rules.findings import NAMED_CHECK, NOTHING, STAGE, Rule, found
from oomwatch.diagnose.rules.placing import amount_of, gpu_failure, is_placeless, shows_serving
from oomwatch.diagnose.rules.startup_checks import oom_values
from oomwatch.records import Finding

_ALLOCATES: Final = re.compile(
    r"\b(?:empty|zeros|ones|full|new_empty|empty_like|zeros_like|cat|stack|pad|clone|repeat|softmax|contiguous|float)\("
)

_LINES_BEFORE: Final = (
    "The lines before the failure: from the server's start, or at least the whole traceback and the last load lines.",
)


def communicator_buffers(facts: Facts) -> Finding | None:
    """NCCL found no GPU memory for a buffer while the engine served."""
    said = facts.said("nccl.oom")
    hit = facts.failing("nccl.oom")
    if (said is None and hit is None) or not shows_serving(facts) or gpu_failure(facts) is not None:
        return None
    order = hit[0].order if hit else said.order if said else None
    return found(
        facts,
        "engine_buffers_unprofiled",
        0.8,
        "NCCL found no GPU memory for its buffers while the engine served: it takes them late, outside PyTorch's allocator and outside the profile.",
        cite_failure(hit[0]) if hit else [cite(said.line)] if said else (),
        strength=NAMED_CHECK,
        order=order,
        values={"stage": "serving"},
    )


def cut_traceback(facts: Facts) -> Finding | None:
    """The engine's step failed, and the line that says with what is not in the input."""
    cut = next((f for f in reversed(facts.failures) if not f.name and f.frames), None)
    if cut is None or len(facts.failures) > 1 or find_stage(cut.frames, cut.paths) != "serving":
        return None
    allocating = _ALLOCATES.search(cut.code) is not None
    return found(
        facts,
        "irregular_unknown",
        0.35 if allocating else 0.25,
        "A step of the engine failed, and the input ends before the line that says with what"
        + (f"; it stood at an allocation: {cut.code}" if allocating else "."),
        cite_failure(cut),
        strength=NOTHING,
        order=cut.order,
        values={"stage": "serving", "frame": telling_frame(cut.frames)},
        unseen=("The exception line at the end of the traceback, and the lines after it.",),
    )


def unplaced_allocation(facts: Facts) -> Finding | None:
    """Memory was refused, and nothing in the input says whether at start or while serving."""
    failure = gpu_failure(facts)
    if failure is None or not is_placeless(facts, failure):
        return None
    part = find_part(failure.frames, failure.paths)
    if part is not None and facts.engine.engine is not None:
        # The profiling run or a request's step: the same room is missing, the same remedies give it.
        return found(
            facts,
            "mm_encoder_peak" if part == "encoder" else "prefill_activation_peak",
            0.4,
            f"The GPU refused an allocation inside the model's step ({amount_of(failure)}); the input does not say whether a request's, or the profiling run's at start.",
            cite_failure(failure),
            strength=STAGE,
            order=failure.order,
            values={**oom_values(failure), "frame": telling_frame(failure.frames)},
            unseen=_LINES_BEFORE,
        )
    return found(
        facts,
        "irregular_unknown",
        0.3,
        f"The GPU refused an allocation ({amount_of(failure)}); the input does not say whether the engine was starting or serving.",
        cite_failure(failure),
        strength=STAGE,
        order=failure.order,
        values={**oom_values(failure), "gpu_refused": True},
        unseen=_LINES_BEFORE,
    )


RULES: Final[tuple[Rule, ...]] = (communicator_buffers, cut_traceback, unplaced_allocation)
