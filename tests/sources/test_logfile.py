"""The reader as a whole: archives that break off, long lines, errors, standard input, hostile input."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import struct
import subprocess
import sys
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.errors import NoDataError, PermissionDeniedError, SourceUnavailable
from oomwatch.records import LogLine
from oomwatch.sources.logfile import read_log, read_stream
from oomwatch.sources.logformat import MAX_TEXT
from oomwatch.sources.logformat_export import ExportParser
from oomwatch.sources.logformat_time import Clock

SENTENCE = "(EngineCore pid=7) INFO 11-29 12:00:00 [core.py:1] line {}"
BODY = "".join(SENTENCE.format(i) + "\n" for i in range(5000)).encode()


def read_bytes(data: bytes, notes: list[str] | None = None) -> list[LogLine]:
    note = notes.append if notes is not None else None
    return list(read_stream(io.BytesIO(data), "x.log", clock=Clock(written_at=0.0), note=note))


def assert_clean(lines: list[LogLine]) -> None:
    for line in lines:
        for text in (line.text, line.process or "", line.origin or "", line.rank or ""):
            bad = [c for c in text if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}]
            assert not bad, (bad, line)
        assert len(line.text) <= MAX_TEXT


# ------------------------------------------------------------------------------- archives
PACKERS = {"gzip": gzip.compress, "zstd": zstandard.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKERS)
def test_archive_of_several_members(kind):
    lines = read_bytes(PACKERS[kind](BODY) + PACKERS[kind](b"and one more\n"))
    assert len(lines) == 5001
    assert lines[-1].text == "and one more"
    assert lines[-1].number == 5001


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("share", [0.4, 0.9, 0.999])
def test_archive_cut_off_is_read_as_far_as_it_goes(kind, share):
    # Text that packs badly, so that a cut leaves something to read.
    body = b"".join(hashlib.sha256(b"%d" % i).hexdigest().encode() + b"\n" for i in range(20_000))
    packed = PACKERS[kind](body)
    notes: list[str] = []
    lines = read_bytes(packed[: int(len(packed) * share)], notes)
    assert len(lines) > 5000
    whole = [line.text.encode() for line in lines[:-1]]
    assert whole == body.split(b"\n")[: len(whole)]
    assert notes == [f"the {kind} archive is cut off; read as far as it goes"]


def test_archive_with_damage_in_it():
    packed = bytearray(gzip.compress(BODY))
    packed[-8:-4] = b"\0\0\0\0"  # its check sum
    notes: list[str] = []
    assert len(read_bytes(bytes(packed), notes)) == 5000
    assert notes == ["the gzip archive is damaged; read as far as it goes"]


def test_a_whole_archive_has_nothing_to_note():
    notes: list[str] = []
    read_bytes(gzip.compress(BODY), notes)
    assert notes == []


# ------------------------------------------------------------------------------- long lines
def test_line_of_100_mb_is_cut_and_the_next_has_its_number(tmp_path):
    path = tmp_path / "long.log"
    with path.open("wb") as out:
        out.write(b"before\n(EngineCore pid=7) ")
        for _ in range(100):
            out.write(b"x" * 1_000_000)
        out.write(b"\nafter\n")
    tracemalloc.start()
    try:
        lines = list(read_log(str(path), full=True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(line.number, line.text[:6]) for line in lines] == [
        (1, "before"),
        (2, "xxxxxx"),
        (3, "after"),
    ]
    assert len(lines[1].text) == MAX_TEXT
    assert peak < 16 << 20


def test_bars_may_be_longer_than_any_line(tmp_path):
    path = tmp_path / "bars.log"
    bar = b"(EngineCore pid=7) Capturing CUDA graphs: %6d/99999 [00:01<00:02, 1.10it/s]"
    path.write_bytes(b"\r".join(bar % i for i in range(9000)) + b"\nValueError: end\n")
    lines = list(read_log(str(path)))
    assert [int(line.text[23:29]) for line in lines[:-1]] == list(range(9000))
    assert {line.number for line in lines[:-1]} == {1}
    assert {line.process for line in lines[:-1]} == {"EngineCore"}
    assert (lines[-1].number, lines[-1].text) == (2, "ValueError: end")


# ------------------------------------------------------------------------------- opening
def test_the_beginning_of_a_log_is_what_comes_behind_its_hole(tmp_path):
    path = tmp_path / "server.log"
    with path.open("wb") as file:
        file.seek(32 << 20)
        file.write(BODY * 50)
    first = next(read_log(str(path)))
    assert (first.number, first.text) == (1, "line 0")


def test_missing_file():
    with pytest.raises(SourceUnavailable, match="no such file"):
        read_log("/nowhere/server.log")


def test_directory(tmp_path):
    with pytest.raises(NoDataError, match="is a directory"):
        read_log(str(tmp_path))


def test_no_permission(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("x\n")
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(PermissionDeniedError, match="no permission"):
            read_log(str(path))
    finally:
        os.seteuid(user)


def test_unreadable_path_is_shown_without_control_characters():
    with pytest.raises(SourceUnavailable) as caught:
        read_log("a\x1b[31m\0b")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_device_without_an_end_is_no_log(device):
    with pytest.raises(NoDataError, match="is a device"):
        next(read_log(device), None)


def test_the_null_device_is_an_empty_log():
    assert list(read_log("/dev/null")) == []


def test_a_file_that_cannot_be_read_at_all():
    with pytest.raises(SourceUnavailable, match=r"cannot be read \(Input/output error\)"):
        next(read_log("/proc/self/mem"), None)


class FailingDisk(io.BytesIO):
    """Gives one block, then fails as a bad sector or a stale mount does."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


def test_a_disk_that_fails_in_the_middle_is_read_as_far_as_it_goes():
    notes = []
    lines = read_stream(
        FailingDisk(b"first\n" + b"x" * 200_000), "log", clock=Clock(None, 0.0), note=notes.append
    )
    assert next(lines).text == "first"
    assert len(list(lines)) == 1
    assert notes == ["reading failed (Input/output error); read as far as it goes"]


def test_one_of_many_files_is_closed_between_its_first_line_and_the_rest(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(BODY)
    lines = read_log(str(path), aside=True)
    first = next(lines)
    assert path not in {link.resolve() for link in Path("/proc/self/fd").iterdir()}
    assert [first, *lines] == list(read_log(str(path)))


def test_one_of_many_files_may_go_away(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(BODY)
    notes = []
    lines = read_log(str(path), aside=True, note=notes.append)
    next(lines)
    path.unlink()
    assert list(lines) == []
    assert notes == [f"{path}: no such file"]


def test_empty_file(tmp_path):
    (tmp_path / "empty.log").touch()
    assert list(read_log(str(tmp_path / "empty.log"))) == []


def test_name_is_what_evidence_cites(tmp_path):
    (tmp_path / "a.log").write_text("x\n")
    (line,) = read_log(str(tmp_path / "a.log"), name="logs/a.log")
    assert line.source == "logs/a.log"


def test_progress_reports_bytes_of_the_file(tmp_path):
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(BODY))
    calls: list[tuple[int, int | None]] = []
    list(read_log(str(path), progress=lambda done, size: calls.append((done, size))))
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)


def test_standard_input():
    code = (
        "from oomwatch.sources.logfile import read_log\n"
        "for line in read_log('-'): print(line.source, line.number, line.text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=gzip.compress(b"one\ntwo\n"),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.decode() == "- 1 one\n- 2 two\n"


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SourceUnavailable, match="standard input cannot be read"):
        read_log("-")


def test_journal_export_after_a_gap_waits_for_the_next_record():
    parser = ExportParser()
    lines = [b"MESSAGE=what a client wrote", b"", b"__CURSOR=s=1", b"MESSAGE=of the engine", b""]
    parser.reset()
    records = [
        record for i, line in enumerate(lines, 7) for record in parser.feed(i, line, len(line))
    ]
    assert [record.messages for record in records] == [[(10, b"of the engine")]]


def test_file_without_a_last_line_feed():
    assert [(line.number, line.text) for line in read_bytes(b"one\ntwo")] == [
        (1, "one"),
        (2, "two"),
    ]


# ------------------------------------------------------------------------------- hostile input
FRAGMENTS = st.sampled_from(
    [
        b"\n", b"\r", b"\r\n", b"\x1b[", b"\x1b]0;", b"\x1b\\", b"\x07", b"\x9b", b"\0", b"[0m", b"#033[1m",
        b"(EngineCore pid=7) ", b"(pid=", b"[rank0]: ", b"INFO 11-29 12:00:00 [core.py:1] ", b"INFO:     ",
        b"2025-03-12T06:09:16.1Z ", b"stderr F ", b"stdout P ", b"vllm-1  | ", b"[pod/a/b] ", b"MESSAGE\n",
        b"Mar 12 06:09:16 host vllm[7]: ", b"__REALTIME_TIMESTAMP=1741238955896764\n", b"MESSAGE=", b"\n\n",
        b'{"log":"', b'\\n","stream":"stderr","time":"2025-03-12T06:09:16Z"}', b'{"MESSAGE":[1,2,300],"time":1}',
        b'{"message":"\\ud800\\u001b[31m","level":"x"}', b"[" * 50, b"{" * 50, b"9" * 40, b" " * 60, b"\xff\xfe",
        b"50%|##| 1/2 [00:01<00:00, 1.1it/s]", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x1f\x8b", b"\x28\xb5\x2f\xfd",
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS | st.binary(max_size=30), max_size=40).map(b"".join))
def test_any_mix_of_fragments_gives_clean_lines(data):
    lines = read_bytes(data)
    assert_clean(lines)
    numbers = [line.number for line in lines]
    assert all(1 <= number <= data.count(b"\n") + 1 for number in numbers)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=2000), st.sampled_from(["", "gzip", "xz", "zstd", "utf-16", "utf-32"]))
def test_random_bytes(data, kind):
    marks = {
        "": b"",
        "gzip": b"\x1f\x8b\x08",
        "xz": b"\xfd7zXZ\0",
        "zstd": b"\x28\xb5\x2f\xfd",
        "utf-16": b"\xff\xfe",
        "utf-32": b"\xff\xfe\0\0",
    }
    assert_clean(read_bytes(marks[kind] + data))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 600), st.sampled_from(sorted(PACKERS)), st.integers(0, 255))
def test_archive_cut_or_changed_anywhere(at, kind, value):
    packed = bytearray(PACKERS[kind](BODY[:4000]))
    at %= len(packed)
    assert_clean(read_bytes(bytes(packed[:at])))
    packed[at] = value
    assert_clean(read_bytes(bytes(packed)))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.sampled_from(["docker", "journal", "vllm", "export"]))
def test_any_text_in_a_wrapper_gives_clean_lines(text, wrapper):
    if wrapper == "export":
        message = text.encode("utf-8", "surrogatepass")
        size = struct.pack("<Q", len(message))
        data = b"__REALTIME_TIMESTAMP=1\nMESSAGE\n" + size + message + b"\n\n"
    else:
        row = {
            "docker": {"log": text + "\n", "stream": "stderr", "time": "2025-03-12T06:09:16Z"},
            "journal": {"MESSAGE": text, "__REALTIME_TIMESTAMP": text[:5], "_PID": text[:4]},
            "vllm": {"message": text, "levelname": "INFO", "process": 7, "processName": text},
        }[wrapper]
        data = json.dumps(row).encode() + b"\n"
    assert_clean(read_bytes(data))


@pytest.mark.parametrize(
    "unit",
    [
        "(a pid=1) ", "(a pid=1, ", "(" * 9, "[rank0]: ", "[" * 9, "INFO ", "INFO: ", "a::", "a.b-c ", "a |", "| ",
        "a" * 9, "9" * 9, "0-", "2025-03-12 ", "2025-03-12T06:09:16.", " " * 9, "\t", "%", "0% [", "50%|1/2 [",
        "it/s]", "\x1b]", "\x1b[", "\x1b[0", "\x1bP", "#033[", "^[[0", "[0m[1", "host vllm[1", "a:1:1 [0] ",
        "Mar 12 06:09:16 ", "[repeated 7x across cluster] (", "srv ", "llama_", "time=", "[TM]", "(Process-",
        '{"log":', "[[", '{"a":[', "\r", "\\", "'", '"', "…", "INFO 11-29 12:00:00 [", "E1129 12:00:00.1 ",
    ],
)  # fmt: skip
def test_long_hostile_lines_end(unit):
    """A pattern of more than linear cost would not end on these within the patience of any runner."""
    for line in (unit * (250_000 // len(unit)), "INFO 11-29 12:00:00 [a.py:1] " + unit * 20_000):
        for tail in ("", "!", "\n", "]", ")"):
            assert_clean(read_bytes((line + tail).encode()))
