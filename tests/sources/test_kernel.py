from __future__ import annotations

import datetime
import gzip
import json
import lzma
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
)
from oomwatch.records import KernelEvent
from oomwatch.sources import kernel
from oomwatch.sources.kernel import (
    has_kernel_lines,
    normalize_pci,
    parse_kernel_lines,
    read_journal,
    read_kernel_log,
    read_kmsg,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kernel"
XID = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python3, Ch 00000008, MMU Fault"
MOMENT = datetime.datetime(2026, 9, 4, 13, 46, 52, tzinfo=datetime.UTC).timestamp()


def events(*lines: str, **options) -> list[KernelEvent]:
    return parse_kernel_lines(enumerate(lines, 1), now=MOMENT + 3600, **options)


def one(*lines: str, **options) -> KernelEvent:
    (event,) = events(*lines, **options)
    return event


# ---------------------------------------------------------------- wrappers
@pytest.mark.parametrize(
    ("line", "at", "monotonic"),
    [
        (f"[ 3928.274063] {XID}", None, 3928.274063),
        (f"[91234.500000][ T4242] {XID}", None, 91234.5),
        (f"<3>[ 3928.274063] {XID}", None, 3928.274063),
        (f"kern  :err   : [ 3928.274063] {XID}", None, 3928.274063),
        (f"[Fri Sep  4 13:46:52 2026] {XID}", MOMENT, None),
        (f"2026-09-04T13:46:52,500000+00:00 {XID}", MOMENT + 0.5, None),
        (f"2026-09-04T15:46:52,000000+02:00 {XID}", MOMENT, None),
        (f"3,1234,3928274063,-;{XID}", None, 3928.274063),
        (f"3,1234,3928274063,-,caller=T4242;{XID}", None, 3928.274063),
        (f"Sep 04 13:46:52 gpu-1 kernel: {XID}", MOMENT, None),
        (f"Sep  4 13:46:52 gpu-1 kernel: [ 3928.274063] {XID}", MOMENT, 3928.274063),
        (f"Sep 04 13:46:52.250000 gpu-1 kernel: {XID}", MOMENT + 0.25, None),
        (f"2026-09-04T13:46:52+0000 gpu-1 kernel: {XID}", MOMENT, None),
        (f"2026-09-04T13:46:52.250000+00:00 gpu-1 kernel: {XID}", MOMENT + 0.25, None),
        (f"Fri 2026-09-04 13:46:52 UTC gpu-1 kernel: {XID}", MOMENT, None),
        (f"{MOMENT:.6f} gpu-1 kernel: {XID}", MOMENT, None),
        (f"[91234.500000] gpu-1 kernel: {XID}", None, 91234.5),
        # A line that was written into /dev/kmsg: journald takes the first word for the tag.
        (f"Sep 04 13:46:52 gpu-1 NVRM: {XID.removeprefix('NVRM: ')}", MOMENT, None),
        (XID, None, None),
        (XID.removeprefix("NVRM: "), None, None),
        (XID + "\r\n", None, None),
    ],
)
def test_wrapper_is_taken_off_and_its_time_kept(line, at, monotonic):
    event = one(line)
    assert event.kind == "xid"
    assert event.fields["xid"] == 31
    assert event.at == (at if at is None else pytest.approx(at))
    assert event.monotonic_seconds == monotonic
    assert "Sep" not in event.text


def test_time_without_a_zone_is_read_in_the_zone_given():
    tokyo = datetime.timezone(datetime.timedelta(hours=9))
    event = one(f"[Fri Sep  4 22:46:52 2026] {XID}", zone=tokyo)
    assert event.at == MOMENT


def test_time_without_a_year_is_the_latest_that_is_not_in_the_future():
    new_year = datetime.datetime(2027, 1, 2, tzinfo=datetime.UTC).timestamp()
    (event,) = parse_kernel_lines([(1, f"Dec 31 23:59:59 h kernel: {XID}")], now=new_year)
    assert event.at is not None
    assert datetime.datetime.fromtimestamp(event.at, datetime.UTC).year == 2026


@pytest.mark.parametrize(
    "line",
    [
        f"Sep 04 13:46:52 gpu-1 vllm[77]: {XID}",
        f"2026-09-04T13:46:52+0000 gpu-1 python3[77]: {XID}",
        f"(APIServer pid=1) INFO prompt: '{XID}'",
        "user asks: why does it say Out of memory: Killed process 77 (vllm) total-vm:1kB",
        json.dumps({"MESSAGE": XID, "SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "stdout"}),
        json.dumps({"MESSAGE": XID, "SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "syslog"}),
    ],
)
def test_what_a_program_writes_is_not_the_kernels_word(line):
    assert events(line) == []


def test_journal_json_in_bytes_and_with_times():
    record = {
        "MESSAGE": list((XID + " \udcff").encode("utf-8", "surrogateescape")),
        "SYSLOG_IDENTIFIER": "kernel",
        "_TRANSPORT": "kernel",
        "__REALTIME_TIMESTAMP": str(int(MOMENT * 1e6)),
        "_SOURCE_MONOTONIC_TIMESTAMP": "5000000",
    }
    event = one(json.dumps(record))
    assert (event.at, event.monotonic_seconds, event.fields["xid"]) == (MOMENT, 5.0, 31)


def test_journal_export_names_the_line_that_ends_the_record():
    found = list(read_kernel_log(str(FIXTURES / "journal.export")))
    assert [event.kind for event in found] == ["xid", "unit_oom_kill"]
    assert found[0].at == 1788529612.0
    assert found[0].monotonic_seconds == 91234.5
    assert found[1].fields == {"unit": "vllm.service"}


# ---------------------------------------------------------------- the OOM killer
def test_kill_in_a_cgroup_is_put_together_from_its_lines():
    first, second = read_kernel_log(str(FIXTURES / "memcg-oom.dmesg"))
    fields = first.fields
    assert (first.kind, first.number, first.monotonic_seconds) == ("oom_kill", 16, 7201.10006)
    assert (fields["pid"], fields["comm"]) == (5140, "VLLM::Worker_TP")
    assert fields["invoked_by"] == "vllm"
    assert (fields["constraint"], fields["scope"]) == ("CONSTRAINT_MEMCG", "cgroup")
    assert fields["oom_memcg"].endswith("0c1d2e3f4a5b.slice")
    assert fields["container"].startswith("aaaaaaaabbbb")
    assert fields["pod_uid"] == "3f1c0b2a-6d5e-4f70-8a9b-0c1d2e3f4a5b"
    assert fields["limit_bytes"] == 16 * 1024**3
    assert fields["anon_rss_bytes"] == 15560000 * 1024
    assert fields["oom_score_adj"] == 980
    assert fields["tasks"][0] == (5140, "VLLM::Worker_TP", 3900000 * 4096)
    assert [task[0] for task in fields["tasks"]] == [5140, 5120, 5100]
    # The rest of the group, and no third event for the reaper of a process already killed.
    assert second.fields["pid"] == 5100
    assert "oom_memcg" in second.fields
    assert second.fields["group"].endswith(".scope")


def test_page_size_follows_from_the_victims_own_line():
    event = one(
        "[1.000000] a invoked oom-killer: gfp_mask=0x1, order=0, oom_score_adj=0",
        "[1.000001] [ pid ]   uid  tgid total_vm      rss nr_ptes swapents oom_score_adj name",
        "[1.000002] [  700]     0   700     1000      500      10        0             0 big one",
        "[1.000003] Out of memory: Killed process 700 (big one) total-vm:64000kB, anon-rss:32000kB, file-rss:0kB",
    )
    assert event.fields["tasks"] == ((700, "big one", 500 * 65536),)


@pytest.mark.parametrize(
    ("line", "pid", "comm", "more"),
    [
        (
            "Out of memory: Killed process 7 (a) b) total-vm:8kB, anon-rss:4kB, file-rss:0kB, shmem-rss:2kB, UID:1000 pgtables:3204kB oom_score_adj:-5",
            7,
            "a) b",
            {"total_vm_bytes": 8192, "shmem_rss_bytes": 2048, "oom_score_adj": -5, "scope": "host"},
        ),
        ("Out of Memory: Killed process 2592 (mysql).", 2592, "mysql", {"scope": "host"}),
        (
            "Killed process 9 (python), UID 1000, total-vm:4kB, anon-rss:1kB, file-rss:1kB, shmem-rss:0kB",
            9,
            "python",
            {"anon_rss_bytes": 1024},
        ),
        (
            "Memory cgroup out of memory: Killed process 12 ([vllm] x) total-vm:4kB, anon-rss:1kB, file-rss:1kB",
            12,
            "[vllm] x",
            {"scope": "cgroup"},
        ),
        (
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=0-1,cpuset=/,mems_allowed=0-1,3,global_oom,task_memcg=/system.slice/lm,b.service,task=a,pid=1,b,pid=77,uid=0",
            77,
            "a,pid=1,b",
            {"unit": "lm,b.service", "constraint": "CONSTRAINT_NONE", "scope": "host"},
        ),
        (
            "oom_reaper: reaped process 31 (VLLM::Worker), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
            31,
            "VLLM::Worker",
            {},
        ),
        (
            "Out of memory: Kill process 31 (java) score 900 or sacrifice child",
            31,
            "java",
            {"scope": "host"},
        ),
    ],
)
def test_forms_of_one_line(line, pid, comm, more):
    event = one(f"[ 100.000001] {line}")
    assert event.kind == "oom_kill"
    assert (event.fields["pid"], event.fields["comm"]) == (pid, comm)
    assert {name: event.fields.get(name) for name in more} == more


@pytest.mark.parametrize(
    ("constraint", "scope"),
    [
        ("CONSTRAINT_NONE", "host"),
        ("CONSTRAINT_MEMCG", "cgroup"),
        ("CONSTRAINT_CPUSET", "cpuset"),
        ("CONSTRAINT_MEMORY_POLICY", "memory_policy"),
    ],
)
def test_what_was_short_of_memory(constraint, scope):
    event = one(
        f"[5.000000] oom-kill:constraint={constraint},nodemask=0-1,3,cpuset=a,b,mems_allowed=0,2-3,task_memcg=/x,task=vllm,pid=9,uid=0",
        "[5.000001] Out of memory: Killed process 9 (vllm) total-vm:4kB, anon-rss:1kB, file-rss:1kB",
    )
    assert (event.fields["constraint"], event.fields["scope"]) == (constraint, scope)
    assert event.fields["task_memcg"] == "/x"


@pytest.mark.parametrize(
    "piece",
    [
        ",cpuset=,mems_allowed=0,oom_memcg=,task_memcg=,task=,pid=1",
        ",oom_memcg=/a,task_memcg=/a",
        " in x[1]",
        ") total-vm:",
        "NV_ERR_NO_MEMOR ",
        "pid=1, name=, ",
    ],
)
@pytest.mark.parametrize(
    "start",
    [
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null)",
        "a[1]: segfault at 1 ip ",
        "Killed process 1 (",
        "NVRM: ",
        "NVRM: Xid (PCI:0000:3b:00): 31, ",
    ],
)
def test_lines_made_to_be_slow_come_back(start, piece):
    long = start + piece * (4000 // len(piece))
    assert len(events(f"[1.000000] {long}", f"[1.000000] {long * 10}", long)) <= 3


def test_child_that_was_sacrificed_is_the_victim():
    event = one(
        "[5.000000] Memory cgroup out of memory: Kill process 31 (vllm) score 900 or sacrifice child",
        "[5.000001] Killed process 32 (VLLM::EngineCor) total-vm:4kB, anon-rss:1kB, file-rss:1kB",
    )
    assert (event.fields["pid"], event.fields["comm"]) == (32, "VLLM::EngineCor")
    assert event.fields["scope"] == "cgroup"


def test_old_cgroup_line_gives_the_paths():
    event = one(
        "[5.000000] Task in /docker/" + "ab" * 32 + " killed as a result of limit of /docker",
        "[5.000001] Memory cgroup out of memory: Kill process 31 (vllm) score 900 or sacrifice child",
        "[5.000002] Killed process 31 (vllm) total-vm:4kB, anon-rss:1kB, file-rss:1kB",
    )
    assert event.fields["container"] == "ab" * 32
    assert event.fields["oom_memcg"] == "/docker"


def test_a_constraint_line_is_not_given_to_another_victim():
    first, second = events(
        "[5.000000] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=x,pid=1,uid=0",
        "[6.000000] Out of memory: Killed process 2 (y) total-vm:4kB, anon-rss:1kB, file-rss:1kB",
    )
    assert "oom_memcg" not in first.fields
    assert (first.fields["pid"], second.fields["pid"]) == (2, 1)


def test_call_without_a_kill_is_its_own_kind():
    event = one("[5.000000] python3 invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0")
    assert (event.kind, event.fields) == ("oom_invoked", {"invoked_by": "python3"})


# ---------------------------------------------------------------- Xid and the driver
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 43, pid=4242, name=python3, Ch 8",
            {"xid": 43, "pid": 4242, "name": "python3", "gpu_instance": 5, "compute_instance": 0},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 43, pid=4242, name=python3, Ch 8",
            {"xid": 43, "gpu_instance": 5},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            {"xid": 79, "detail": "GPU has fallen off the bus.", "xid_kind": "hardware"},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 94, pid='<unknown>', name=<unknown>, Contained: CE",
            {"xid": 94, "detail": "Contained: CE"},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1122, GPU has fallen off the bus.",
            {"xid": 79, "pid": 1122, "detail": "GPU has fallen off the bus."},
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 43, pid=4242, name=app, channel 0x0b00000a",
            {"pci": "0009:01:00", "name": "app", "detail": "channel 0x0b00000a"},
        ),
        (
            "NVRM: Xid (0000:01:00): 13, 0001 00000000 0000a097",
            {"xid": 13, "pci": "0000:01:00", "xid_kind": "program"},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 45, pid=1122, name=python3, Ch 1 caused by previous Xid 149",
            {"xid": 45, "pid": 1122, "caused_by_xid": 149},
        ),
        ("NVRM: Xid (PCI:0000:3B:00): 9999", {"xid": 9999, "pci": "0000:3b:00"}),
    ],
)
def test_forms_of_xid(text, expected):
    event = one(f"[1.000000] {text}")
    assert event.kind == "xid"
    assert {name: event.fields.get(name) for name in expected} == expected
    if "unknown" in text:
        assert "pid" not in event.fields
        assert "name" not in event.fields


def test_uuid_line_names_the_gpu_of_later_xids():
    event = one(
        "[1.000000] NVRM: GPU at PCI:0000:3b:00: GPU-efbdfde9-0000-1111-2222-333344445555",
        f"[1.000001] {XID}",
    )
    assert event.fields["uuid"] == "GPU-efbdfde9-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("text", "kind", "fields"),
    [
        (
            "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from f(x) @ mem_desc.c:1353",
            "driver_no_memory",
            {},
        ),
        (
            "NVRM: API mismatch: the client has the version 535.104.05, but",
            "driver_mismatch",
            {"client_version": "535.104.05"},
        ),
        (
            "NVRM: API mismatch: the client 'nvidia-smi' (pid 99) has the version 550.54.15, but this kernel module has the version 550.54.14.  Please",
            "driver_mismatch",
            {"client_version": "550.54.15", "kernel_version": "550.54.14"},
        ),
        (
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
            "hardware_ecc",
            {"corrected": False},
        ),
        (
            "EDAC skx MC1: 3 CE memory read error on CPU_SrcID#1",
            "hardware_ecc",
            {"corrected": True},
        ),
        ("{1}[Hardware Error]: section_type: memory error", "hardware_ecc", {}),
        ("Memory failure: 0x1f2a3b: recovery action for dirty LRU page", "hardware_ecc", {}),
        (
            "VLLM::Worker_TP[4711]: segfault at 18 ip 00007f00 sp 00007ff0 error 4 in libcuda.so.1[7f00+2000] likely on CPU 3 (core 3, socket 0)",
            "native_crash",
            {
                "pid": 4711,
                "comm": "VLLM::Worker_TP",
                "module": "libcuda.so.1",
                "offset": "7f00+2000",
            },
        ),
        (
            "traps: VLLM::Worker[88] trap invalid opcode ip:7f sp:7f error:0 in libdnnl.so[7f+1]",
            "native_crash",
            {"pid": 88, "comm": "VLLM::Worker", "module": "libdnnl.so", "offset": "7f+1"},
        ),
        (
            "vllm.service: Failed with result 'oom-kill'.",
            "unit_oom_kill",
            {"unit": "vllm.service"},
        ),
    ],
)
def test_other_kinds(text, kind, fields):
    event = one(f"Sep 04 13:46:52 gpu-1 {'systemd[1]' if 'service' in text else 'kernel'}: {text}")
    assert (event.kind, event.fields) == (kind, fields)


def test_pci_addresses_are_compared_as_numbers():
    assert normalize_pci("00000000:3B:00.0") == normalize_pci("0000:3b:00") == "0000:3b:00"
    assert normalize_pci("nonsense") is None


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("k.log", bytes),
        ("k.log.gz", gzip.compress),
        ("k.log.xz", lzma.compress),
        ("k.log.zst", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
def test_files_plain_and_packed(tmp_path, name, pack):
    text = b"noise\n\xff\xfe\n" + b"x" * 200_000 + b"\n" + f"[1.000000] {XID}".encode()
    (tmp_path / name).write_bytes(pack(text))
    (event,) = read_kernel_log(str(tmp_path / name))
    assert event.number == 4


def test_missing_damaged_and_forbidden_files(tmp_path):
    with pytest.raises(NoDataError, match="no such file"):
        list(read_kernel_log(str(tmp_path / "none")))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-12])
    text = " ".join(str(number) for number in range(9000)).encode()
    (tmp_path / "bad.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"\xff" * 500)
    (tmp_path / "bad.gz").write_bytes(gzip.compress(text)[:60] + b"\xff" * 5000)
    for name in ("cut.gz", "bad.zst", "bad.gz"):
        with pytest.raises(SourceUnavailable, match="damaged"):
            list(read_kernel_log(str(tmp_path / name)))
    with pytest.raises(SourceUnavailable):
        list(read_kernel_log(str(tmp_path)))
    if os.geteuid() != 0:
        (tmp_path / "secret").write_text("x")
        (tmp_path / "secret").chmod(0)
        with pytest.raises(PermissionDeniedError):
            list(read_kernel_log(str(tmp_path / "secret")))


def test_control_characters_do_not_get_through():
    event = one("[1.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=\x1b[31mx\x07, y\x9b")
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in event.text)
    assert event.fields["name"] == "x"


@given(
    st.lists(
        st.one_of(
            st.text(max_size=80),
            st.sampled_from((FIXTURES / "memcg-oom.dmesg").read_text().splitlines()),
            st.sampled_from((FIXTURES / "journal.export").read_text().split("\n")),
        ),
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_mixture_of_lines_is_survived(lines):
    for event in events(*lines):
        assert event.kind
        assert 1 <= event.number <= len(lines)


# ---------------------------------------------------------------- live
def test_kmsg_records_get_times_from_the_boot(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,2500000,-;{XID}\n SUBSYSTEM=pci\n6,2,2600000,-;usb 1-1: new device\n")
    (event,) = read_kmsg(str(log), boot_time=1000.0)
    assert event.at == 1002.5
    assert event.fields["pid"] == 4242


def test_this_hosts_ring_buffer_is_read_or_the_reason_is_named():
    try:
        assert isinstance(read_kmsg(), list)
    except SourceError as error:
        assert "/dev/kmsg" in str(error)  # noqa: PT017 - either outcome is right


def test_kmsg_without_permission_says_what_to_allow(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    node = tmp_path / "kmsg"
    node.write_text("")
    node.chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            read_kmsg(str(node))
        except PermissionDeniedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def _fake_journalctl(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "journalctl"
    program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_journal_is_read_through_journalctl(tmp_path, monkeypatch):
    record = {"MESSAGE": XID, "_TRANSPORT": "kernel", "__REALTIME_TIMESTAMP": "5000000"}
    _fake_journalctl(tmp_path, monkeypatch, f"print({json.dumps(json.dumps(record))})")
    (event,) = read_journal()
    assert event.at == 5.0


def test_journal_that_hangs_is_given_up(tmp_path, monkeypatch):
    _fake_journalctl(tmp_path, monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(kernel, "_JOURNAL_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(SourceUnavailable, match="did not end"):
        read_journal()


@pytest.mark.parametrize(
    ("complaint", "error"),
    [
        ("No journal files were opened due to insufficient permissions.", PermissionDeniedError),
        ("No journal files were found.", NoDataError),
    ],
)
def test_journal_that_cannot_be_read(tmp_path, monkeypatch, complaint, error):
    _fake_journalctl(tmp_path, monkeypatch, f"sys.exit({complaint!r})")
    with pytest.raises(error):
        read_journal()


def test_no_journalctl_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDataError, match="journalctl"):
        read_journal()


def test_a_real_journal(tmp_path):
    remote = Path("/lib/systemd/systemd-journal-remote")
    if not remote.exists():
        pytest.skip("systemd-journal-remote is not installed")
    subprocess.run(
        [remote, "-o", tmp_path / "k.journal", FIXTURES / "journal.export"],
        check=True,
        capture_output=True,
    )
    events = read_journal(directory=str(tmp_path))
    assert [event.kind for event in events] == ["xid", "unit_oom_kill"]


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("[    0.000000] Linux version 6.1.0\n", True),
        ("Sep  4 13:46:52 host kernel: usb 1-1: new device\n", True),
        ("6,1,2000,-;Linux version 6.1.0\n", True),
        ("Sep  4 13:46:52 host sshd[7]: Accepted key\n", False),
        ("INFO 09-04 13:46:52 [api_server.py:1] vLLM API server version 0.11.2\n", False),
        ("", False),
    ],
)
def test_whether_a_file_is_of_a_kernel(tmp_path, text, kernels):
    path = tmp_path / "some.log.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert has_kernel_lines(str(path)) is kernels
    with pytest.raises(NoDataError):
        has_kernel_lines(str(tmp_path / "missing"))
