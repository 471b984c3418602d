"""One fixture for each form a log comes in, named after it, and what must come out."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from oomwatch.records import LogLine
from oomwatch.sources.logfile import read_log

FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"
FIRST = 1741759756.0  # 2025-03-12 06:09:16 UTC
FATAL = FIRST + 28
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB."
FRAME = '  File "/srv/app/worker.py", line 7, in load'
TEXTS = [
    "vLLM API server version 0.13.0",
    "EngineCore failed to start.",
    "Traceback (most recent call last):",
    FRAME,
    OOM,
    "Killed",
]
MARCH = 1741759800.0  # a file written on that day


def read(name: str, **settings) -> list[LogLine]:
    settings = {"zone": datetime.UTC, "written_at": MARCH, **settings}
    return list(read_log(str(FIXTURES / name), **settings))


WHOLE = [
    "plain.log",
    "gzip.log.gz",
    "gzip_members.log.gz",
    "zstd.log.zst",
    "xz.log.xz",
    "docker_json_file.log",
    "cri.log",
    "journal_export.export",
    "journal_json.log",
    "journal_json_seq.log",
    "journal_short.log",
    "journal_short_precise.log",
    "journal_short_iso.log",
    "journal_short_iso_precise.log",
    "journal_short_full.log",
    "journal_short_unix.log",
    "journal_short_monotonic.log",
    "syslog_escaped.log",
    "compose.log",
    "compose_timestamps.log",
    "kubectl_prefix.log",
    "kubectl_prefix_timestamps.log",
    "kubectl_timestamps.log",
    "iso_prefix.log",
    "ansi_colours.log",
    "osc_sequences.log",
    "crlf.log",
    "markdown_emphasis.log",
    "utf16.log",
    "utf16_be.log",
    "utf8_mark.log",
    "zero_bytes.log",
    "compose_around_cri.log",
    "docker_around_cri.log",
    "kubectl_around_docker_json.log",
]


@pytest.mark.parametrize("name", WHOLE)
def test_form_gives_the_same_lines_as_the_plain_file(name):
    lines = read(name)
    assert [line.text for line in lines] == TEXTS
    first, fatal, *rest, last = lines
    assert (first.level, first.process, first.pid) == ("INFO", "APIServer", 4242)
    assert (fatal.level, fatal.process, fatal.pid) == ("ERROR", "EngineCore_DP0", 4300)
    assert (fatal.rank, fatal.origin) == ("DP0", "core.py:866")
    assert first.at == pytest.approx(FIRST, abs=1)
    assert fatal.at == pytest.approx(FATAL, abs=1)
    assert all(line.prefixed for line in lines[:-1])
    assert not last.prefixed
    assert [line.process for line in rest] == ["EngineCore_DP0"] * 3
    assert {line.source for line in lines} == {str(FIXTURES / name)}


@pytest.mark.parametrize("name", [name for name in WHOLE if "export" not in name])
def test_form_keeps_the_numbers_of_the_file(name):
    assert [line.number for line in read(name)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["journal_export.export", "journal_export_binary.export"])
def test_journal_export_numbers_are_where_the_text_stands(name):
    file_lines = (FIXTURES / name).read_bytes().split(b"\n")
    for line in read(name):
        assert line.text.strip().encode()[-10:] in file_lines[line.number - 1]


def test_journal_export_binary():
    lines = read("journal_export_binary.export")
    assert [line.text for line in lines] == [TEXTS[0], *TEXTS[2:5], "0123456789", "Killed"]
    assert (lines[-1].process, lines[-1].pid) == ("vllm", 72702)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("**(EngineCore pid=7) WARNING 03-12 06:09:16 [a.py:1] one", "one"),
        ("(EngineCore pid=7) WARNING 03-12 06:09:16 [a.py:1] **one**", "one"),
        ("*** SIGSEGV (@0x0) received by PID 7 ***", "*** SIGSEGV (@0x0) received by PID 7 ***"),
        ("**options", "**options"),
        ("*a* and *b* are", "*a* and *b* are"),
    ],
)
def test_only_emphasis_of_a_whole_line_or_record_is_taken_off(tmp_path, written, text):
    (tmp_path / "server.log").write_text(written + "\n")
    assert [line.text for line in read_log(str(tmp_path / "server.log"))] == [text]


STREAMS = ["docker_json_file.log", "cri.log", "compose_around_cri.log"]


@pytest.mark.parametrize("name", [*STREAMS, "kubectl_around_docker_json.log"])
def test_stream_is_known_where_the_runtime_writes_it(name):
    assert read(name)[-1].stream == "stderr"
    assert read("plain.log")[-1].stream is None


TIMED = [
    "docker_json_file.log",
    "cri.log",
    "compose_around_cri.log",
    "compose_timestamps.log",
    "kubectl_timestamps.log",
    "iso_prefix.log",
    "journal_short.log",
    "journal_short_full.log",
    "journal_export.export",
]


@pytest.mark.parametrize("name", TIMED)
def test_every_line_has_a_time_where_the_wrapper_writes_it(name):
    times = [line.at for line in read(name)]
    assert times == pytest.approx([FIRST + s for s in (0, 28, 28, 28, 29, 30)], abs=0.6)


@pytest.mark.parametrize("name", ["docker_pieces.log", "cri_pieces.log"])
def test_pieces_of_a_cut_line_are_joined(name):
    other, whole, rest = read(name)
    assert (whole.number, whole.text, whole.stream) == (1, OOM, "stderr")
    assert (other.number, other.text, other.stream) == (2, "other stream", "stdout")
    assert (rest.number, rest.text, rest.stream) == (5, "no end", "stderr")


def test_journal_short_multiline():
    boot, head, frame, error, kernel = read("journal_short_multiline.log")
    assert boot.text == "-- Boot 4f1c --"
    assert (head.text, frame.text, error.text) == (TEXTS[2], FRAME, "ValueError: x")
    assert (error.process, error.pid, error.at) == ("vllm", 72702, FATAL)
    assert kernel.process == "kernel"


def test_supervisor():
    lines = read("supervisor.log")
    assert [line.text for line in lines] == TEXTS
    assert (lines[1].level, lines[1].process) == ("ERROR", "Process-215")


def test_ray():
    *lines, other = read("ray.log")
    assert [line.text for line in lines] == TEXTS
    assert {(line.process, line.pid) for line in lines} == {("RayWorkerWrapper", 210)}
    assert (other.text, other.process, other.pid) == ("Found nccl", None, 211)


def test_ray_repeated():
    first, second = read("ray_repeated.log")
    assert first.text == "Error executing method load_model."
    assert second.text == "second"


def test_colours_without_escape():
    (line,) = read("colours_without_escape.log")
    assert (line.text, line.process) == ("Error executing method load_model.", "RayWorkerWrapper")


def test_carriage_return_bars():
    lines = read("carriage_return_bars.log")
    assert [line.number for line in lines] == [1, 1, 1, 2, 3]
    assert [line.text[39:43] for line in lines[:4]] == ["  0%", " 50%", "100%", "100%"]
    assert lines[-1].text == OOM


def test_bars_of_one_process():
    *bars, last = read("bars_of_one_process.log")
    assert {(bar.number, bar.process, bar.pid) for bar in bars} == {(1, "EngineCore_DP0", 4300)}
    assert len(bars) == 3
    assert (last.number, last.text) == (2, OOM)


def test_bars_in_a_wrapper():
    bars = read("bars_in_a_wrapper.log")
    assert {(bar.at, bar.stream, bar.process) for bar in bars} == {
        (FATAL + 0.1, "stderr", "EngineCore_DP0")
    }


def test_record_behind_a_bar():
    bar, record, other_bar, second = read("record_behind_a_bar.log")
    assert bar.text.endswith("1.10s/it]")
    assert (record.text, record.level, record.number) == (TEXTS[1], "ERROR", 1)
    assert other_bar.text == bar.text
    assert (second.text, second.origin, second.number) == ("second", "core.py:866", 2)


def test_vllm_json():
    banner, fatal, *traceback, killed = read("vllm_json.log")
    assert (banner.level, banner.process, banner.pid) == ("INFO", "APIServer", 4300)
    assert banner.at == pytest.approx(FIRST + 0.25)
    assert (fatal.number, fatal.text) == (2, TEXTS[1])
    assert [line.number for line in traceback] == [2, 2, 2]
    assert traceback[1].text == FRAME
    assert all(line.prefixed and line.level == "ERROR" for line in traceback)
    assert (killed.number, killed.text) == (3, "Killed")


def test_json_of_a_client_is_left_as_it_is():
    assert [line.text[:11] for line in read("client_json.log")] == ['{"message":', '{"messages"']


def test_interleaved_ranks():
    lines = read("interleaved_ranks.log")
    assert [line.rank for line in lines] == ["0", "1", "PP0 TP1", "1", "0", "1", "DP0 TP3"]
    assert [line.pid for line in lines] == [120, 121, 123, None, None, None, None]
    assert lines[4].text == FRAME
    assert lines[5].text == "Watchdog caught collective operation timeout"
    assert (lines[5].level, lines[5].origin) == ("ERROR", "ProcessGroupNCCL.cpp:629")


def test_restarts():
    lines = read("restarts.log", written_at=MARCH + 7 * 86400)
    assert [line.text for line in lines] == TEXTS * 3
    days = [(line.at - FIRST) / 86400 for line in lines if line.text == TEXTS[0]]
    assert days == [0, 1, 2]


def test_latin1():
    assert read("latin1.log")[-1].text == "Mod\ufffdle charg\ufffd"


def test_invalid_utf8():
    lines = read("invalid_utf8.log")
    assert [line.text for line in lines[:5]] == TEXTS[:5]
    assert lines[5].text == "Kil\ufffd\ufffd\ufffdled"
    assert lines[6].text == "\ufffd"


def test_no_year_follows_the_last_change_of_the_file():
    before, after = read("no_year_over_new_year.log", written_at=1735862400.0)  # 2025-01-03
    assert (before.at, after.at) == (1735689598.0, 1735689602.0)


def test_no_year_follows_a_dated_line_nearby():
    _, before, after = read("no_year_beside_dated.log")
    assert (before.at, after.at) == (1688169599.0, 1688169601.0)


def test_zone_is_a_setting():
    east = datetime.timezone(datetime.timedelta(hours=8))
    assert read("plain.log", zone=east)[0].at == FIRST - 8 * 3600
    assert read("cri.log", zone=east)[0].at == pytest.approx(FIRST, abs=1)  # has an offset


@pytest.mark.parametrize(
    "line",
    [
        "2025-03-12T06:09:16.1Z CUDA error: out of memory",
        "2025-03-12T06:09:16.1+08:00 CUDA error: out of memory",
        "2025-03-12 06:09:16 CUDA error: out of memory",
        "[pod/vllm-0/server] CUDA error: out of memory",
        "2025-03-12T06:09:16+0000 gpu-01 vllm[7]: CUDA error: out of memory",
        "2025-03-12T06:09:16+0000 gpu-01 kernel: CUDA error: out of memory",
        "CUDA error: out of memory",
    ],
)
def test_text_is_not_taken_for_a_wrapper(tmp_path, line):
    (tmp_path / "a.log").write_text(line + "\n")
    assert [each.text for each in read_log(str(tmp_path / "a.log"))] == [
        "CUDA error: out of memory"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "INFO | not a service",
        "| GPU  Name        Persistence-M | Bus-Id |",
        "slot      release: id  0 | task 7 | stop processing",
        "a b | c",
    ],
)
def test_bars_and_tables_are_not_compose(tmp_path, line):
    (tmp_path / "a.log").write_text(line + "\n")
    assert [each.text for each in read_log(str(tmp_path / "a.log"))] == [line]


def test_pod_and_container_of_stern_are_taken_off_bare_lines_too(tmp_path):
    lines = [
        "vllm-0 server starting",  # nothing an engine wrote: it stays
        "vllm-0 server (Worker_TP0 pid=7) ERROR 03-12 06:09:16 [executor.py:9] Traceback (most recent call last):",
        'vllm-0 server   File "/srv/app/worker.py", line 7, in load',
        "vllm-1 server [2025-03-12 06:09:17 TP0] Prefill batch.",
    ]
    (tmp_path / "pods.log").write_text("\n".join(lines) + "\n")
    read_lines = list(read_log(str(tmp_path / "pods.log")))
    assert [line.text for line in read_lines] == [
        "vllm-0 server starting",
        "Traceback (most recent call last):",
        FRAME,
        "Prefill batch.",
    ]
    assert read_lines[1].process == "Worker_TP0"


def test_lines_of_the_log_explorer(tmp_path):
    line = "INFO 2025-03-12T06:09:16.000000000Z [resource.labels.containerName: vllm] (EngineCore_DP0 pid=270) ERROR 03-12 06:09:16 [v1/engine/core.py:842] failed"
    (tmp_path / "a.log").write_text(line + "\n")
    (read_line,) = read_log(str(tmp_path / "a.log"))
    assert (read_line.text, read_line.at, read_line.process) == ("failed", FIRST, "EngineCore_DP0")


def test_workers_named_after_their_rank(tmp_path):
    line = "(VllmWorker TP1 pid=406) ERROR 08-16 01:07:56 [multiproc_executor.py:596] failed"
    (tmp_path / "a.log").write_text(line + "\n")
    (read_line,) = read_log(str(tmp_path / "a.log"))
    assert (read_line.text, read_line.rank, read_line.pid) == ("failed", "TP1", 406)


@pytest.mark.parametrize(
    "record",
    [
        "INFO 03-12 06:09:16 api_server.py:528] vLLM API server version 0.6.5",
        "INFO 03-12 06:09:16 [api_server.py:528] vLLM API server version 0.6.5",
    ],
)
@pytest.mark.parametrize("stamp", ["2025-03-12T06:09:16.000000Z", "2025-03-12T06:09:16.000000000Z"])
def test_a_stamp_before_vllms_own_level(tmp_path, stamp, record):
    (tmp_path / "a.log").write_text(f"{stamp} {record}\n")
    (read_line,) = read_log(str(tmp_path / "a.log"))
    assert (read_line.text, read_line.level, read_line.origin) == (
        "vLLM API server version 0.6.5",
        "INFO",
        "api_server.py:528",
    )
