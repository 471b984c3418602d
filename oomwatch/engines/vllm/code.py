"""Where vLLM's code stood in which releases: frames of a traceback tell the generation and a span.

Read in the release sources 0.3.3 to 0.33.0.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Files of the package, the releases that have them, and the generation that runs them."""

    pattern: re.Pattern[str]
    span: str
    generation: str | None = None


PLACES: Final = (
    Place(re.compile(r"/vllm/v1/"), "0.6.4..", "V1"),
    Place(re.compile(r"/vllm/v1/worker/worker_base\.py"), "0.11.1.."),
    Place(re.compile(r"/vllm/v1/worker/gpu/"), "0.12.0.."),
    # V1 borrows the base of its workers and its executors from V0 until that is gone.
    Place(re.compile(r"/vllm/worker/(?!worker_base\.py|__init__)"), "..0.10.2", "V0"),
    Place(re.compile(r"/vllm/(?:worker|executor)/"), "..0.11.0"),
)
GENERATIONS: Final = {"V0": "..0.10.2", "V1": "0.6.4.."}
"""The releases in which each generation can run."""
