from __future__ import annotations

from oomwatch.engines.pytorch import parse_oom
from oomwatch.units import MIB


def test_ggml_says_what_it_asked_for_and_on_which_gpu() -> None:
    oom = parse_oom(
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9412.25 MiB on device 1: "
        "cudaMalloc failed: out of memory"
    )
    assert oom is not None
    assert (oom.tried_bytes, oom.gpu, oom.free_bytes) == (9412.25 * MIB, 1, None)


def test_a_line_without_sizes_has_none() -> None:
    assert parse_oom("CUDA error: out of memory") is None
