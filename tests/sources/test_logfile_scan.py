"""Which parts of a large log are read: nothing telling is lost, line numbers stay, memory is bounded."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.engines.literals import LITERALS
from oomwatch.sources import scan
from oomwatch.sources.logformat_lines import split_lines
from oomwatch.sources.scan import choose_pieces, hyperscan_look, look_with_find, telling_spans

ACCESS = b'INFO:     10.0.0.%d:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
STATS = b"(APIServer pid=7) INFO 07-01 08:00:%02d [loggers.py:335] Engine 000: Running: 3 reqs, GPU KV cache usage: %.1f%%\n"
PROMPT = b"INFO 07-01 08:00:00 [request_logger.py:65] Received request chatcmpl-1: prompt: 'what does Error: CUDA out of memory mean', params\n"
FATAL = (
    b"(EngineCore pid=9) ERROR 07-01 08:00:01 [core.py:866] EngineCore encountered a fatal error.\n"
)
BLOCK = 4096
SMALL = {"small": 10_000, "head": 8192, "tail": 8192, "windows": 1 << 20}

looks = [pytest.param(look_with_find, id="find")]
if hyperscan_look() is not None:
    looks.append(pytest.param(hyperscan_look(), id="hyperscan"))


def healthy(lines: int) -> bytes:
    """A busy server's log: access lines, low use, prompts that quote errors."""
    kinds = [ACCESS % (i % 250) for i in range(8)] + [STATS % (i, 9.9 * i / 8) for i in range(8)]
    return b"".join(PROMPT if i % 20 == 0 else kinds[i % 16] for i in range(lines))


def blocks_of(data: bytes, size: int = BLOCK) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def chosen(data: bytes, look=look_with_find, size: int = BLOCK, **settings) -> dict[int, bytes]:
    """The lines that are read, by number."""
    pieces = choose_pieces(blocks_of(data, size), look=look, **{**SMALL, **settings})
    return {line.number: line.data for line in split_lines(pieces)}


def test_small_file_is_read_whole():
    data = healthy(100)
    assert len(chosen(data, small=len(data))) == 100
    assert len(chosen(data, small=len(data), tail=BLOCK)) == 100


def test_full_reads_everything():
    data = healthy(2000)
    pieces = choose_pieces(blocks_of(data), full=True, **SMALL)
    assert sum(1 for _ in split_lines(pieces)) == 2000


@pytest.mark.parametrize("look", looks)
def test_healthy_log_is_read_at_its_ends_only(look):
    data = healthy(5000)
    lines = chosen(data, look)
    numbers = sorted(lines)
    assert numbers[0] == 1
    assert numbers[-1] == 5000
    assert sum(map(len, lines.values())) < 8192 * 2 + 4 * BLOCK
    assert numbers[-1] - len(numbers) > 3000  # the middle was left out


@pytest.mark.parametrize("look", looks)
@pytest.mark.parametrize("literal", LITERALS, ids=lambda entry: entry.text.decode())
def test_each_literal_is_found_in_the_middle(look, literal):
    word = {b"usage: ": b"usage: 97.5%"}.get(literal.text, literal.text)
    data = healthy(3000) + b"a line with " + word + b" in it\n" + healthy(3000)
    assert chosen(data, look)[3001] == b"a line with " + word + b" in it"


@pytest.mark.parametrize("look", looks)
def test_neighbours_of_a_telling_line_are_read(look):
    data = healthy(3000) + FATAL + healthy(3000)
    lines = chosen(data, look)
    assert set(range(2990, 3012)) <= set(lines)
    assert lines[3001] + b"\n" == FATAL


@pytest.mark.parametrize("look", looks)
@pytest.mark.parametrize("usage", [b"90.0%", b"97.3%", b"100.0%", b"0.93, a", b"1.00, a"])
def test_statistics_of_a_full_pool_are_read_without_neighbours(look, usage):
    line = b"(APIServer pid=7) INFO GPU KV cache usage: " + usage
    lines = chosen(healthy(3000) + line + b"\n" + healthy(3000), look)
    assert lines[3001] == line
    assert 3000 not in lines
    assert 3002 not in lines


@pytest.mark.parametrize("look", looks)
@pytest.mark.parametrize("usage", [b"9.9%", b"45.0%", b"10.0%", b"1.2%", b"0.45"])
def test_statistics_of_a_pool_with_room_are_not(look, usage):
    data = healthy(3000) + b"INFO GPU KV cache usage: " + usage + b"\n" + healthy(3000)
    assert 3001 not in chosen(data, look)


@pytest.mark.parametrize("shift", range(0, 120, 7))
@pytest.mark.parametrize("look", looks)
def test_word_across_a_border_of_blocks(look, shift):
    before = healthy(300)
    before = before[: before.rfind(b"\n", 0, 5 * BLOCK) + 1]
    fill = b"x" * (5 * BLOCK - len(before) - 1 - shift) + b"\n"
    data = before + fill + FATAL + healthy(300)
    number = (before + fill).count(b"\n") + 1
    assert chosen(data, look)[number] + b"\n" == FATAL


@pytest.mark.parametrize("look", looks)
def test_log_of_errors_only_is_thinned_out(look):
    data = b"".join(FATAL + healthy(400) for _ in range(60))
    assert len(chosen(data, look)) > 8000
    thin = chosen(data, look, windows=BLOCK)
    fatal = range(1, 60 * 401, 401)
    assert set(fatal) <= set(thin)
    assert len(thin) < len(chosen(data, look))


def test_line_whose_beginning_is_left_out_is_not_given():
    # One line over several blocks: what a client wrote must not come out as a line of its own.
    prompt = (
        b"Received request x: prompt: '"
        + b"y" * (3 * BLOCK)
        + b"ERROR out of memory"
        + b"y" * BLOCK
        + b"'\n"
    )
    data = healthy(3000) + prompt + healthy(3000)
    for line in chosen(data).values():
        assert b"out of memory" not in line or b"Received request" in line


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([ACCESS % 1, STATS % (1, 95.0), STATS % (1, 9.0), PROMPT, FATAL, b"x" * 900 + b"\n", b"\n"]),
        min_size=1, max_size=120,
    ),
    st.integers(64, 700),
    st.sampled_from([0, 600, 1 << 20]),
)  # fmt: skip
def test_what_is_read_stands_in_the_file_where_it_says(lines, size, windows):
    data = b"".join(lines)
    read = chosen(data, size=size, small=300, head=300, tail=700, windows=windows)
    for number, line in read.items():
        assert line + b"\n" == lines[number - 1]
    if windows == 1 << 20:
        assert {i for i, line in enumerate(lines, 1) if line == FATAL} <= set(read)
    if len(lines[-1]) < 600:  # else it begins before the end that is read
        assert len(lines) in read


@pytest.mark.skipif(hyperscan_look() is None, reason="the fast extra is not installed")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *(entry.text for entry in LITERALS),
                b"97.",
                b"100",
                b"0.9",
                b"usage",
                b" ",
                b"\n",
                b"er",
            ]
        )
    ).map(b"".join)
)
def test_both_looks_agree(data):
    fast = hyperscan_look()
    assert fast is not None
    assert fast(data) == look_with_find(data)
    assert fast(data) or telling_spans(data) == ([], False)


def test_base_installation_looks_with_find(monkeypatch):
    monkeypatch.setattr(scan, "hyperscan_look", lambda: None)
    assert scan.best_look() is look_with_find


VLLM_START = b"""\
(APIServer pid=8) INFO 07-02 08:00:00 [api_server.py:1977] vLLM API server version 0.13.0
(APIServer pid=8) INFO 07-02 08:00:00 [utils.py:253] non-default args: {'model': '/models/chat'}
(EngineCore_DP0 pid=9) INFO 07-02 08:00:09 [core.py:93] Initializing a V1 LLM engine (v0.13.0)
(EngineCore_DP0 pid=9) INFO 07-02 08:00:20 [gpu_model_runner.py:3562] Model loading took 14.2 GiB memory
(EngineCore_DP0 pid=9) INFO 07-02 08:00:31 [kv_cache_utils.py:1291] GPU KV cache size: 412,672 tokens
(APIServer pid=8) INFO:     Started server process [8]
"""
SGLANG_START = b"""\
[2025-07-02 08:00:00] server_args=ServerArgs(model_path='/models/chat')
[2025-07-02 08:00:05 TP0] Load weight begin. avail mem=78.50 GB
[2025-07-02 08:00:20 TP0] KV Cache is allocated. #tokens: 412672, K size: 20.1 GB, V size: 20.1 GB
[2025-07-02 08:00:20 TP0] Memory pool end. avail mem=9.10 GB
[2025-07-02 08:00:30] The server is fired up and ready to roll!
"""


@pytest.mark.parametrize("look", looks)
@pytest.mark.parametrize("start", [VLLM_START, SGLANG_START], ids=["vllm", "sglang"])
def test_restart_in_the_middle_is_read_whole(look, start):
    busy = healthy(60_000)
    lines = chosen(
        busy + start + busy, look, 128 << 10, head=1 << 20, tail=1 << 20, windows=64 << 20
    )
    wanted = start.splitlines()
    assert [lines.get(60_001 + i) for i in range(len(wanted))] == wanted


READER = """
import re, sys
from oomwatch.sources.logfile import read_log
count = 0
for line in read_log(sys.argv[1], note=lambda note: print(note.rpartition(": ")[2])):
    count += 1
    if line.process == "EngineCore":
        print(line.number, line.level, line.text)
status = open("/proc/self/status").read()  # rusage would show the peak of the parent
print(count, int(re.search(r"VmHWM:\\s+(\\d+) kB", status).group(1)) // 1024)
"""


def test_large_file_end_to_end_in_bounded_memory(tmp_path):
    path = tmp_path / "large.log"
    middle = healthy(60_000)
    with path.open("wb") as out:
        out.write(middle * 10)
        out.write(FATAL)
        out.write(middle * 10)
    assert path.stat().st_size > 6 * scan.SMALL
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)],
        capture_output=True,
        check=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    note, found, counts = done.stdout.splitlines()
    assert note == "large, so read at its ends and around telling lines"
    assert found == "600001 ERROR EngineCore encountered a fatal error."
    count, peak_mib = map(int, counts.split())
    assert count < 60_000
    assert peak_mib < 90


# ------------------------------------------------------------------------------- the list of words
DECISIVE = {"pressure", "check", "oom", "failure", "messenger", "lifecycle"}


def decisive_samples() -> list[tuple[str, str]]:
    """Id and whole line of each decisive pattern: an exception's message stands behind its class."""
    engines = Path(__file__).parents[2] / "oomwatch" / "engines"
    samples = []
    for path in sorted(engines.rglob("*.py")):
        name = ".".join(path.relative_to(engines.parents[1]).with_suffix("").parts)
        if path.stem in {"__init__", "patterns", "pytorch", "common"} or path.stem.endswith(
            "patterns"
        ):
            for value in vars(importlib.import_module(name)).values():
                for entry in value if isinstance(value, tuple) else ():
                    if getattr(entry, "kind", None) in DECISIVE and hasattr(entry, "sample"):
                        text = (
                            entry.sample
                            if entry.where == "line"
                            else f"RuntimeError: {entry.sample}"
                        )
                        samples.append((entry.id, text))
    return samples


# Lines that stand beside others of the same event, within the neighbourhood that is read.
BESIDE_OTHERS = {
    "shutdown.complete": "uvicorn writes it right after Shutting down",
    "crash.heap": "glibc aborts, and the parent says that the process died",
    "sglang.rank_dead": "the launcher's traceback follows",
}


@pytest.mark.parametrize(
    "text",
    [
        "Shutting down",
        "[shutdown] API server: shutdown triggered",
        "Received SIGTERM",
        "SIGTERM received. Draining requests and shutting down...",
        "Shutdown initiated",
        "Initiating shutdown",
        "Server shutdown requested",
        "signal received, starting graceful shutdown",
    ],
)
def test_requests_to_stop_are_telling(text):
    assert look_with_find(b"INFO " + text.encode() + b"\n")


def test_every_decisive_line_holds_a_literal():
    missing = [
        (name, text)
        for name, text in decisive_samples()
        if not look_with_find(text.encode()) and name not in BESIDE_OTHERS
    ]
    assert missing == []
