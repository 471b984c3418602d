"""The bounded copy of a server's output."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.sources.log_copy import LogCopy


def copy_of(chunks, **limits):
    with LogCopy(None, **limits) as copy:
        for stream, data in chunks:
            copy.write(stream, data)
    data = copy.path.read_bytes()
    copy.path.unlink()
    return copy, data


def test_small_output_is_whole():
    _, data = copy_of([("out", b"one\ntw"), ("out", b"o\nthree")])
    assert data == b"one\ntwo\nthree\n"


def test_streams_are_joined_by_whole_lines():
    _, data = copy_of([("out", b"out 1 "), ("err", b"err 1\nerr"), ("out", b"goes on\n")])
    assert data == b"err 1\nout 1 goes on\nerr\n"


def test_the_file_is_private_wherever_it_is(tmp_path):
    path = tmp_path / "copy.log"
    path.write_text("old")
    path.chmod(0o644)
    for target in (None, path):
        with LogCopy(target) as copy:
            mode = stat.S_IMODE(copy.path.stat().st_mode)
        assert mode == 0o600
        copy.path.unlink()


def test_the_head_is_there_before_the_end(tmp_path):
    with LogCopy(tmp_path / "copy.log") as copy:
        copy.write("out", b"version 1\n")
        assert copy.path.read_bytes() == b"version 1\n"


def test_long_output_keeps_head_and_tail():
    lines = [b"line %06d\n" % number for number in range(10_000)]
    copy, data = copy_of([("out", line) for line in lines], head_bytes=1200, tail_bytes=2400)
    assert data.startswith(lines[0] + lines[1])
    assert data.endswith(lines[-2] + lines[-1])
    assert len(data) <= 1200 + 2400 + 100
    note = next(line for line in data.splitlines() if line.startswith(b"oomwatch:"))
    assert note == b"oomwatch: %d bytes of output are left out here" % copy.left_out_bytes
    assert copy.left_out_bytes + len(data) - len(note) - 1 == sum(map(len, lines))


def test_a_line_without_end_does_not_wait_for_ever():
    with LogCopy(None) as copy:
        for _ in range(10):
            copy.write("out", b"\rloading" * 10_000)
        assert copy.path.stat().st_size > 500_000
    copy.path.unlink()


def test_a_late_writer_is_ignored(tmp_path):
    copy = LogCopy(tmp_path / "copy.log")
    copy.close()
    copy.write("out", b"late\n")
    copy.close()
    assert copy.path.read_bytes() == b""


def test_a_full_disk_is_remembered_not_raised():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    copy = LogCopy(None)
    copy.path.unlink()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, copy._file.fileno())
    os.close(descriptor)
    copy.write("out", b"text\n")
    copy.close()
    assert copy.error is not None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["out", "err"]), st.binary(max_size=40)), max_size=40),
    st.integers(0, 200),
    st.integers(2, 400),
)
def test_nothing_is_invented_and_the_bound_holds(chunks, head, tail):
    copy, data = copy_of(chunks, head_bytes=head, tail_bytes=tail)
    total = sum(len(chunk) for _, chunk in chunks)
    kept = len(data) if not copy.left_out_bytes else len(data.replace(b"oomwatch: ", b"")) - 10
    assert kept <= total + 2 + 60
    if not copy.left_out_bytes:
        assert sorted(data.replace(b"\n", b"")) == sorted(
            b"".join(chunk for _, chunk in chunks).replace(b"\n", b"")
        )
