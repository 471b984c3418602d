from __future__ import annotations

import dataclasses

import pytest
from logtext import READY, SERVED, START, WRITTEN_AT, inputs_of, raised

from oomwatch.diagnose.inputs import KernelInput
from oomwatch.diagnose.judge import diagnose
from oomwatch.records import Diagnosis, KernelEvent

DEAD = "(APIServer pid=1) ERROR 11-20 10:12:44 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n"
LAUNCH = raised("RuntimeError: CUDA error: unspecified launch failure", "core.py:run_busy_loop")
NO_BLOCKS = raised("ValueError: No available memory for the cache blocks.", "kv_cache_utils.py:f")


def judged(log: str, *events: KernelEvent) -> Diagnosis:
    return diagnose(dataclasses.replace(inputs_of(log), kernel=(KernelInput("kern.log", events),)))


def xid(code: int, at: float | None = None) -> KernelEvent:
    return KernelEvent(
        "xid",
        f"NVRM: Xid (PCI:0000:4a:00): {code}",
        1,
        at,
        None,
        {"xid": code, "pci": "0000:4a:00"},
    )


@pytest.mark.parametrize("code", [48, 64, 74, 79, 94, 95, 119])
def test_codes_of_the_board_are_a_hardware_fault(code: int) -> None:
    found = judged(START + READY + SERVED + DEAD, xid(code))
    assert (found.verdict, found.incidents[0].finding.cause) == ("not_oom", "gpu_hw_fault")
    assert found.incidents[0].finding.values["xid"] == code


@pytest.mark.parametrize("code", [13, 31, 43])
@pytest.mark.parametrize("end", [DEAD, LAUNCH])
def test_codes_of_a_program_are_its_own_bug(code: int, end: str) -> None:
    found = judged(START + READY + SERVED + end, xid(code))
    assert found.incidents[0].finding.cause == "illegal_memory_access"


def test_a_launch_failure_alone_is_taken_for_hardware() -> None:
    assert judged(START + READY + SERVED + LAUNCH).incidents[0].finding.cause == "gpu_hw_fault"


@pytest.mark.parametrize("code", [45, 63, 92, 154])
def test_notes_and_cleanups_do_not_outrank_what_the_log_says(code: int) -> None:
    found = judged(START + NO_BLOCKS, xid(code))
    assert (found.verdict, found.incidents[0].finding.cause) == ("oom", "kv_no_blocks")
    healthy = judged(START + READY + SERVED, xid(code))
    assert (healthy.verdict, healthy.incidents) == ("healthy", ())


def test_a_note_explains_a_death_without_words() -> None:
    assert (
        judged(START + READY + SERVED + DEAD, xid(63)).incidents[0].finding.cause == "gpu_hw_fault"
    )


@pytest.mark.parametrize(
    ("corrected", "cause"), [(True, "irregular_unknown"), (False, "gpu_hw_fault")]
)
def test_only_uncorrected_memory_errors_count(corrected: bool, cause: str) -> None:
    event = KernelEvent(
        "hardware_ecc", "EDAC MC0: 1 error", 1, None, None, {"corrected": corrected}
    )
    assert judged(START + READY + SERVED + DEAD, event).incidents[0].finding.cause == cause


@pytest.mark.parametrize(
    ("days", "cause"), [(-7, "kv_no_blocks"), (7, "kv_no_blocks"), (0, "gpu_hw_fault")]
)
def test_a_fault_of_another_day_is_no_reason(days: int, cause: str) -> None:
    start = 1_763_630_111.0  # 2025-11-20 09:15:11 UTC, within the log
    assert start < WRITTEN_AT
    assert (
        judged(START + NO_BLOCKS, xid(79, start + days * 86_400)).incidents[0].finding.cause
        == cause
    )
