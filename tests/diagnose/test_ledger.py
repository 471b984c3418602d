"""The parts of every GPU's ledger add up to its total, whatever the numbers say."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from logtext import READY, SERVED, START, inputs_of, raised

from oomwatch.diagnose.assemble import assemble
from oomwatch.diagnose.judge import diagnose, find_all
from oomwatch.diagnose.ledger import build_ledgers
from oomwatch.records import GpuLedger, GpuProcessSample, GpuSample, RecordedEngine, Series

GIB = 1 << 30
few = settings(max_examples=40, deadline=None)
SIZE = st.floats(0, 200, allow_nan=False).map(lambda gib: round(gib, 2))


def check(ledgers: tuple[GpuLedger, ...]) -> None:
    assert ledgers
    for ledger in ledgers:
        assert ledger.total_bytes
        assert sum(part.bytes for part in ledger.parts) == ledger.total_bytes
        assert all(part.bytes > 0 for part in ledger.parts)


PIECES = (
    "Process 77 has {} GiB memory in use. ",
    "Including non-PyTorch memory, this process has {} GiB memory in use. ",
    "Of the allocated memory {} GiB is allocated by PyTorch, ",
    "with {} GiB allocated in private pools (e.g., CUDA Graphs), ",
    "and {} GiB is reserved by PyTorch but unallocated.",
)


@few
@given(
    total=st.floats(1, 200).map(lambda gib: round(gib, 2)),
    free=SIZE,
    sizes=st.tuples(*[SIZE | st.none()] * len(PIECES)),
    served=st.booleans(),
)
def test_parts_of_a_message_add_up(
    *, total: float, free: float, sizes: tuple[float | None, ...], served: bool
) -> None:
    text = (
        f"CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of {total} GiB"
    )
    text += f" of which {free} GiB is free. "
    text += "".join(
        piece.format(size) for piece, size in zip(PIECES, sizes, strict=True) if size is not None
    )
    log = START + (READY + SERVED if served else "")
    log += raised(
        f"torch.OutOfMemoryError: {text}", "core.py:run_busy_loop", "activation.py:forward"
    )
    facts = assemble(inputs_of(log))[0]
    check(build_ledgers(facts, find_all(facts)[0], ()))


@few
@given(
    total=st.integers(GIB, 200 * GIB),
    rows=st.lists(
        st.tuples(*[st.integers(0, 200 * GIB)] * 3, st.integers(0, 200 * GIB)),
        min_size=1,
        max_size=5,
    ),
)
def test_parts_of_samples_add_up(total: int, rows: list[tuple[int, int, int, int]]) -> None:
    series = Series(
        gpus=tuple(
            GpuSample(
                float(at),
                0,
                total_bytes=total,
                used_bytes=used,
                free_bytes=free,
                reserved_bytes=kept,
            )
            for at, (used, free, kept, _) in enumerate(rows)
        ),
        gpu_processes=tuple(
            GpuProcessSample(float(at), 0, pid, used_bytes=held)
            for at, (*_, held) in enumerate(rows)
            for pid in (171, 900)
        ),
    )
    log = START + raised("ValueError: No available memory for the cache blocks.", "a.py:f")
    inputs = dataclasses.replace(
        inputs_of(log), series=series, engines=(RecordedEngine("e", "vllm", pids=(171,)),)
    )
    facts = assemble(inputs)[0]
    check(build_ledgers(facts, find_all(facts)[0], series.gpus))


def test_parts_of_the_example_are_named() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
        "which 1.00 GiB is free. Process 77 has 4.00 GiB memory in use. Including non-PyTorch memory, this process has 75.00 GiB "
        "memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated."
    )
    log = START + READY + SERVED + raised(text, "core.py:run_busy_loop", "activation.py:forward")
    (ledger,) = diagnose(inputs_of(log)).incidents[0].memory
    parts = {part.name: part.bytes / GIB for part in ledger.parts}
    assert parts["other_processes"] == 4
    assert parts["fragmentation"] == 2
    assert parts["non_torch"] == 3
    assert parts["free"] == 1
    assert parts["weights"] + parts["kv_cache"] + parts["activation"] == 70
    check((ledger,))


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 200.00 MiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated "
    "memory 78.00 GiB is allocated by PyTorch, and 64.00 MiB is reserved by PyTorch but unallocated."
)


def largest(log: str) -> str:
    (ledger,) = diagnose(inputs_of(log)).incidents[0].memory
    check((ledger,))
    return max(ledger.parts, key=lambda part: part.bytes).name


def test_while_weights_are_loaded_there_is_no_kv_cache() -> None:
    begun = "".join(START.splitlines(keepends=True)[:3])
    log = begun + raised(FULL, "gpu_model_runner.py:load_model", "linear.py:create_weights")
    assert largest(log) == "weights"


def test_where_nobody_printed_the_weights_they_are_in_what_the_engine_holds() -> None:
    unsaid = "".join(START.splitlines(keepends=True)[:2]) + READY + SERVED
    log = unsaid + raised(FULL, "core.py:run_busy_loop", "activation.py:forward")
    assert largest(log) == "engine"
