"""A unit's log, from journal files made for the test by systemd-journal-remote."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
    UsageError,
)
from oomwatch.sources.journal import _explain, read_unit

WRITER = shutil.which(
    "systemd-journal-remote", path=f"{os.environ['PATH']}:/lib/systemd:/usr/lib/systemd"
)
needs_journal = pytest.mark.skipif(
    WRITER is None or shutil.which("journalctl") is None,
    reason="systemd-journal-remote or journalctl is not installed",
)
START = 1741759756
FIRST, SECOND = "1" * 32, "2" * 32
BOOT = "b" * 32


def record(at: float, message: str, **fields: str) -> bytes:
    """One entry in export format; a message with control characters is written as binary."""
    head = f"__REALTIME_TIMESTAMP={round(at * 1e6)}\n__MONOTONIC_TIMESTAMP={round((at - START) * 1e6) + 1}\n_BOOT_ID={BOOT}\n"
    rest = "".join(f"{key}={value}\n" for key, value in fields.items())
    data = message.encode()
    if message.isprintable():
        text = b"MESSAGE=" + data
    else:
        text = b"MESSAGE\n" + len(data).to_bytes(8, "little") + data
    return head.encode() + rest.encode() + text + b"\n\n"


def service(at: float, message: str, invocation: str) -> bytes:
    return record(at, message, _PID="77", _SYSTEMD_UNIT="vllm.service", SYSLOG_IDENTIFIER="vllm", _SYSTEMD_INVOCATION_ID=invocation)  # fmt: skip


def manager(at: float, message: str, invocation: str, **more: str) -> bytes:
    return record(at, message, _PID="1", UNIT="vllm.service", SYSLOG_IDENTIFIER="systemd", INVOCATION_ID=invocation, **more)  # fmt: skip


STARTING = {"MESSAGE_ID": "7d4958e842da4a758f6c1cdc7b36dcc5"}
RECORDS = [
    manager(START, "Starting vllm.service - vLLM...", FIRST, **STARTING),
    service(START + 1, "INFO 03-12 06:09:17 [core.py:1] first start", FIRST),
    service(START + 2, "torch.OutOfMemoryError: CUDA out of memory.", FIRST),
    manager(START + 3, "vllm.service: Main process exited, code=exited, status=1/FAILURE", FIRST),
    record(START + 4, "another program", _PID="9", _SYSTEMD_UNIT="cron.service"),
    manager(START + 10, "Starting vllm.service - vLLM...", SECOND, **STARTING),
    service(START + 11, "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 03-12 06:09:27 [core.py:1] second start", SECOND),
    manager(START + 12, "vllm.service: A process of this unit has been killed by the OOM killer.", SECOND),
]  # fmt: skip


@pytest.fixture
def journal(tmp_path) -> str:
    return write_journal(tmp_path, RECORDS)


def write_journal(folder: Path, records: list[bytes]) -> str:
    source = folder / "in.export"
    source.write_bytes(b"".join(records))
    target = folder / "journal"
    target.mkdir()
    subprocess.run(
        [str(WRITER), "-o", str(target / "x.journal"), str(source)], check=True, capture_output=True
    )
    return str(target)


@needs_journal
def test_last_start_with_what_systemd_says_about_it(journal):
    log = read_unit("vllm", directory=journal)
    lines = list(log.lines)
    assert [line.text for line in lines] == [
        "Starting vllm.service - vLLM...",
        "second start",
        "vllm.service: A process of this unit has been killed by the OOM killer.",
    ]
    assert (lines[1].process, lines[1].pid, lines[1].level) == ("EngineCore", 7, "INFO")
    assert lines[1].at == START + 11
    assert (lines[2].process, lines[2].pid) == ("systemd", 1)
    assert log.name == "vllm.service"
    assert lines[0].source == "vllm.service"


@needs_journal
def test_several_starts(journal):
    texts = [line.text for line in read_unit("vllm.service", starts=2, directory=journal).lines]
    assert "first start" in texts
    assert "second start" in texts
    assert "another program" not in texts


@needs_journal
def test_window_of_time(journal):
    log = read_unit("vllm", since=START + 1, until=START + 2.5, directory=journal)
    assert [line.text for line in log.lines] == [
        "first start",
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]


@needs_journal
def test_records_without_an_invocation_are_read_whole(tmp_path):
    lines = [
        record(START + i, f"line {i}", _PID="7", _SYSTEMD_UNIT="vllm.service") for i in range(3)
    ]
    log = read_unit("vllm", directory=write_journal(tmp_path, lines))
    assert [line.text for line in log.lines] == ["line 0", "line 1", "line 2"]


@needs_journal
def test_unit_that_logged_nothing(journal):
    with pytest.raises(NoDataError, match=r"unit sglang\.service: nothing in the journal"):
        read_unit("sglang", directory=journal)


@needs_journal
def test_lines_may_be_left_unread(journal):
    lines = read_unit("vllm", directory=journal).lines
    next(lines)
    lines.close()  # type: ignore[attr-defined]
    assert next(lines, None) is None


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="no journalctl")
def test_no_journal_files(tmp_path):
    with pytest.raises(SourceError, match=r"nothing in the journal|no journal files"):
        read_unit("vllm", directory=str(tmp_path))


def test_no_journalctl(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceUnavailable, match="journalctl is not on this host"):
        read_unit("vllm")


@pytest.mark.parametrize("unit", ["-D/etc", "--help", "a b", "", "a\x1b[31m", "a/b", "x" * 300])
def test_what_is_no_unit(unit):
    with pytest.raises(UsageError) as caught:
        read_unit(unit)
    assert str(caught.value).isprintable()


SCRIPT = """#!/bin/sh
echo '{said}' >&2
exit {status}
"""


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("No journal files were opened due to insufficient permissions.", "group systemd-journal"),
        ("Hint: You are currently not seeing messages from other users and the system.", "group systemd-journal"),
        ("No journal files were found.", "no journal files"),
        ("Failed to add match: Bad message", "journalctl says: Failed to add match"),
    ],
)  # fmt: skip
def test_what_journalctl_complains_about(monkeypatch, tmp_path, said, status, expected):
    script = tmp_path / "journalctl"
    script.write_text(SCRIPT.format(said=said, status=status))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(type(_explain(said, "x")), match=expected):
        read_unit("vllm", since=1.0)


@pytest.mark.parametrize(
    ("kept", "error", "said"),
    [
        (":", SourceUnavailable, "no journal is kept on this host"),
        ("echo No journal files were found. >&2", SourceUnavailable, "no journal is kept"),
        ("echo Permission denied >&2; exit 1", PermissionDeniedError, "may not be read"),
        ("echo a line of another unit", NoDataError, "nothing in the journal"),
    ],
)
def test_a_missing_journal_is_not_called_a_missing_unit(monkeypatch, tmp_path, kept, error, said):
    program = tmp_path / "journalctl"
    look = f'#!/bin/sh\ncase "$*" in *--system*) {kept} ;; esac\n'
    program.write_text(look)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(error, match=f"^unit vllm.service: .*{said}"):
        read_unit("vllm")
