"""Any text, however it is mixed, cut or meant: no fault, a valid answer, nothing hostile printed.

Lines are made of fragments that engines really print, with values put in that a client, a label or
a damaged file may bring. The whole path is run: reading, diagnosis, remedies, JSON and text.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from logtext import OOM, READY, SERVED, START, raised

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.errors import NoInputError
from oomwatch.report.json_report import read_schema, to_json
from oomwatch.report.markdown import render_markdown
from oomwatch.report.text import render_text

VALIDATOR = jsonschema.Draft202012Validator(read_schema())
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NUMBER = st.one_of(
    st.integers(-3, 10**6).map(str),
    st.sampled_from(["0", "-1", "0.0", "1e309", "9" * 400, "nan", "1,234,567", "", "٣", "0x10"]),
)
HOSTILE = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=40),
    st.sampled_from(
        [
            "\x1b[31mred\x1b[0m",
            "\x1b]0;title\x07",
            "\x00\x00",
            "\u202eevil",
            "{{template}}",
            "%s%n",
            "'; drop table incidents; --",
            "<script>alert(1)</script>",
            "$(reboot)",
            "a" * 5000,
            "--gpu-memory-utilization 9",
        ]
    ),
)
FRAGMENTS = (
    "{p}Traceback (most recent call last):",
    '{p}  File "/opt/vllm/{h}.py", line {n}, in {h}',
    '{p}  File "/opt/vllm/v1/worker/gpu_model_runner.py", line {n}, in execute_model',
    "{p}    out = self.forward(*args, **kwargs)",
    "{p}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n} GiB. GPU {n} has a total capacity of {n} GiB of which {n} GiB is free.",
    "{p}RuntimeError: {h}",
    "{p}ValueError: No available memory for the cache blocks. {h}",
    "{p}ValueError: To serve at least one request with the models's max seq len ({n}), ({n} GiB KV cache is needed, which is larger than the available KV cache memory ({n} GiB).",
    "{p}INFO 11-20 09:15:10 [gpu_worker.py:298] Available KV cache memory: {n} GiB",
    "{p}INFO 11-20 09:15:10 [kv_cache_utils.py:1087] GPU KV cache size: {n} tokens",
    "{p}INFO 11-20 09:15:11 [loggers.py:127] Engine 000: Avg prompt throughput: {n} tokens/s, Avg generation throughput: {n} tokens/s, Running: {n} reqs, Waiting: {n} reqs, GPU KV cache usage: {n}%, Prefix cache hit rate: 1%",
    "{p}INFO 11-20 09:14:02 [utils.py:233] non-default args: {{'model': '{h}', 'max_model_len': {n}, 'gpu_memory_utilization': {n}}}",
    "{p}ERROR 11-20 09:30:00 [core.py:710] EngineCore encountered a fatal error.",
    "[2025-09-03 14:05:02 TP{n}] Scheduler hit an exception: Traceback (most recent call last):",
    "[2025-09-03 14:01:03] server_args=ServerArgs(model_path='{h}', mem_fraction_static={n}, tp_size={n})",
    "[2025-09-03 14:05:02 TP0] Decode batch, #running-req: {n}, #token: {n}, token usage: {n}, gen throughput (token/s): {n}, #queue-req: {n}",
    "Prefill out of memory. Try to lower your batch size.",
    "Try to allocate {n} tokens.",
    "Available tokens: {n} (available_size={n} + evictable_size={n})",
    "INFO 05-20 08:01:00 gpu_executor.py:122] # GPU blocks: {n}, # CPU blocks: {n}",
    "vllm serve: error: argument --{h}: invalid choice: '{h}'",
    "Worker proc {h} died unexpectedly (exit code: {n}), shutting down executor.",
    "Failed core proc(s): {{'{h}': -{n}}}",
    "container exited with code {n}",
    "vllm.service: Main process exited, code=killed, status={n}/KILL",
    '{{"log":"{h}\\n","stream":"stdout","time":"2025-11-20T09:00:00Z"}}',
    "2025-11-20T09:00:00.000000000Z stderr P {h}",
    "{h}  | {h}",
    "INFO 11-20 09:20:00 [logger.py:41] Received request {h}: prompt: '{h}', params: SamplingParams(n={n})",
    'INFO:     10.0.0.1:1 - "POST /v1/{h} HTTP/1.1" 200 OK',
    "Killed",
    "```",
    "# {h}",
    "{h}",
    "",
)
PREFIXES = (
    "",
    "(EngineCore_DP0 pid=171) ",
    "(Worker_TP1 pid=301) ERROR 11-20 09:30:11 [core.py:710] ",
    "[rank2]: ",
)


@st.composite
def line(draw: st.DrawFn) -> str:
    """One fragment, its blanks filled in."""
    text = draw(st.sampled_from(FRAGMENTS)).replace("{p}", draw(st.sampled_from(PREFIXES)))
    parts = re.split(r"(\{[nh]\})", text)
    values = [
        draw(NUMBER) if part == "{n}" else draw(HOSTILE) if part == "{h}" else part
        for part in parts
    ]
    return "".join(values).replace("{{", "{").replace("}}", "}")


@st.composite
def log(draw: st.DrawFn) -> bytes:
    """Real beginnings, fragments between, ends cut anywhere; any line ends, any damage."""
    head = draw(st.sampled_from(["", START, START + READY, START + READY + SERVED]))
    body = draw(st.lists(line(), max_size=25))
    tail = draw(
        st.sampled_from(
            ["", raised(f"torch.OutOfMemoryError: {OOM}", "core.py:step", "a.py:forward")]
        )
    )
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    data = (head.replace("\n", end) + end.join(body) + end + tail).encode("utf-8", "surrogatepass")
    cut = draw(st.integers(0, len(data)))
    damage = draw(st.sampled_from([b"", b"\xff\xfe", b"\x00" * 50, b"\x1f\x8b\x08"]))
    return draw(st.sampled_from([data, data[:cut], data[cut:], data[:cut] + damage + data[cut:]]))


def answer(*files: bytes, kernel: bytes | None = None) -> tuple[str, str]:
    """The text and Markdown of a diagnosis of these files, its JSON having been validated."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for index, data in enumerate(files):
            paths.append(Path(folder, f"{index}.log"))
            paths[-1].write_bytes(data)
        kernel_logs: tuple[str, ...] = ()
        if kernel is not None:
            Path(folder, "kern.log").write_bytes(kernel)
            kernel_logs = (str(Path(folder, "kern.log")),)
        try:
            diagnosis = run_diagnosis(Options(logs=tuple(map(str, paths)), kernel_logs=kernel_logs))
        except NoInputError as error:
            return str(error), ""
    VALIDATOR.validate(to_json(diagnosis))
    for incident in diagnosis.incidents:
        assert incident.finding.evidence, incident.finding.cause
        assert 0 <= incident.finding.confidence <= 1
        for ledger in incident.memory:
            assert sum(part.bytes for part in ledger.parts) == ledger.total_bytes
    return render_text(diagnosis), render_markdown(diagnosis)


@few
@given(log())
@example(START.encode() + b"\x1b[31m" * 100)
@example(b"Traceback (most recent call last):\n" * 300)
@example(b'  File "/a.py", line 1, in f\n' * 300)
@example((START + "(EngineCore_DP0 pid=171) " + "x" * 300_000 + "\n").encode())
@example(b"\r" * 5000)
def test_any_log_gets_a_valid_answer_without_control_characters(data: bytes) -> None:
    for text in answer(data):
        assert CONTROL.search(text.replace("\n", "")) is None


@few
@given(st.lists(log(), min_size=2, max_size=3))
def test_several_logs_of_any_text_are_merged_without_a_fault(files: list[bytes]) -> None:
    for text in answer(*files):
        assert CONTROL.search(text.replace("\n", "")) is None


@few
@given(log(), st.lists(HOSTILE, min_size=1, max_size=3))
def test_kernel_logs_with_hostile_names_are_harmless(data: bytes, names: list[str]) -> None:
    kernel = "".join(
        f"[ 12.00000{i}] Out of memory: Killed process 171 ({name}) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB\n"
        f"[ 13.00000{i}] NVRM: Xid (PCI:0000:4a:00): 79, pid=171, name={name}, {name}\n"
        for i, name in enumerate(names)
    )
    for text in answer(data, kernel=kernel.encode("utf-8", "surrogatepass")):
        assert CONTROL.search(text.replace("\n", "")) is None


@few
@given(st.data())
def test_ranks_may_be_mixed_in_any_way(data: st.DataObject) -> None:
    """However the lines of three ranks are shuffled, the first to fail for memory is found."""
    ranks = [
        raised(
            f"torch.OutOfMemoryError: {OOM}",
            "core.py:step",
            "activation.py:forward_cuda",
            who=f"Worker_TP{r} pid=30{r}",
        ).splitlines(keepends=True)
        for r in range(3)
    ]
    mixed = ""
    while any(ranks):
        rank = data.draw(st.sampled_from([lines for lines in ranks if lines]))
        mixed += rank.pop(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.log")
        path.write_text(START + READY + SERVED + mixed, encoding="utf-8")
        diagnosis = run_diagnosis(Options(logs=(str(path),)))
    assert [i.finding.cause for i in diagnosis.incidents] == ["prefill_activation_peak"]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_tiny_files_are_unknown(size: int) -> None:
    text, _ = answer(b"\n" * size or b"x")
    assert text
