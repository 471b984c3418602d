from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.sources.cgroup import (
    identify,
    owner_path,
    parse_proc_cgroup,
    read_memory,
    read_pressure,
)
from oomwatch.units import GIB

TREES = Path(__file__).parent.parent / "fixtures" / "cgroup"
ID = "ab" * 32
OTHER = "cd" * 32
POD = "3f1c0b2a-6d5e-4f70-8a9b-0c1d2e3f4a5b"
POD_SLICE = f"kubepods-burstable-pod{POD.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("path", "unit", "runtime", "container", "pod_uid"),
    [
        ("/system.slice/vllm.service", "vllm.service", None, None, None),
        (
            "/system.slice/system-vllm.slice/vllm@llama.service/sub",
            "vllm@llama.service",
            *3 * [None],
        ),
        (r"/system.slice/a\x2db.service", r"a\x2db.service", None, None, None),
        (
            "/user.slice/user-7.slice/user@7.service/app.slice/srv.service",
            "srv.service",
            *3 * [None],
        ),
        ("/user.slice/user-7.slice/user@7.service/app.slice", "user@7.service", *3 * [None]),
        ("/user.slice/user-7.slice/session-3.scope", "session-3.scope", None, None, None),
        (f"/system.slice/docker-{ID}.scope", None, "docker", ID, None),
        (f"/docker/{ID}", None, "docker", ID, None),
        (f"/docker/{ID}/docker/{OTHER}", None, "docker", OTHER, None),
        (f"/machine.slice/libpod-{ID}.scope/container", None, "podman", ID, None),
        (
            f"/user.slice/user-7.slice/user@7.service/user.slice/libpod-{ID}.scope",
            None,
            "podman",
            ID,
            None,
        ),
        (f"/system.slice/llm.service/libpod-payload-{ID}", "llm.service", "podman", ID, None),
        (f"/system.slice/nerdctl-{ID}.scope", None, "containerd", ID, None),
        (
            f"/kubepods.slice/kubepods-burstable.slice/{POD_SLICE}/cri-containerd-{ID}.scope",
            None,
            "containerd",
            ID,
            POD,
        ),
        (
            f"/kubepods.slice/kubepods-burstable.slice/{POD_SLICE}/crio-{ID}.scope",
            None,
            "cri-o",
            ID,
            POD,
        ),
        (f"/kubepods/besteffort/pod{POD}/{ID}", None, None, ID, POD),
        (f"/kubepods/burstable/pod{'0f' * 16}/{ID}", None, None, ID, "0f" * 16),
        (
            f"/system.slice/containerd.service/{POD_SLICE}:cri-containerd:{ID}",
            None,
            "containerd",
            ID,
            POD,
        ),
        ("/", None, None, None, None),
        ("/../../system.slice", None, None, None, None),
    ],
)
def test_owner_from_the_path(path, unit, runtime, container, pod_uid):
    identity = identify(path)
    found = (identity.unit, identity.runtime, identity.container, identity.pod_uid)
    assert found == (unit, runtime, container, pod_uid)


@given(st.text(alphabet="/abcdef0123456789.-:_podkubes\\x", max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_path_has_an_identity(path):
    assert identify(path).path == path


def test_proc_cgroup_of_both_versions():
    text = (
        f"12:cpu,cpuacct:/docker/{ID}\n4:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n"
    )
    paths = parse_proc_cgroup(text)
    assert paths["memory"] == paths["cpuacct"] == f"/docker/{ID}"
    assert paths[""] == "/"
    assert owner_path(paths) == f"/docker/{ID}"
    assert owner_path(parse_proc_cgroup("0::/a.service (deleted)\n")) == "/a.service"
    assert owner_path(parse_proc_cgroup("0::/\n")) == "/"
    assert owner_path(parse_proc_cgroup("garbage\n1:x\n")) is None


def test_version_2_limit_of_an_ancestor_counts():
    memory = read_memory({"": "/system.slice/vllm.service"}, root=str(TREES / "v2"))
    assert memory is not None
    assert (memory.version, memory.path) == (2, "/system.slice/vllm.service")
    assert (memory.limit_bytes, memory.limit_path) == (64 * GIB, "/system.slice")
    assert memory.high_bytes == 60 * GIB
    assert (memory.usage_bytes, memory.peak_bytes) == (48 * GIB, 63 * GIB)
    assert (memory.anon_bytes, memory.shmem_bytes) == (40 * GIB, 2 * GIB)
    assert (memory.oom_events, memory.oom_kills, memory.oom_group) == (3, 2, True)
    assert memory.swap_bytes == 0
    assert memory.swap_limit_bytes is None
    assert memory.pressure is not None
    assert memory.pressure.some_10s_ratio == 0.125
    assert memory.pressure.full_total_seconds == 2.0


def test_version_1_where_no_limit_is_a_huge_number():
    paths = {"memory": f"/docker/{ID}", "": "/"}
    memory = read_memory(paths, root=str(TREES / "v1"))
    assert memory is not None
    assert (memory.version, memory.limit_bytes) == (1, 32 * GIB)
    assert memory.usage_bytes == 31 * GIB
    assert memory.anon_bytes == 29 * GIB
    assert memory.oom_kills == 4
    assert memory.oom_group is None
    unlimited = read_memory({"memory": "/docker"}, root=str(TREES / "v1"))
    assert unlimited is not None
    assert (unlimited.limit_bytes, unlimited.limit_path) == (None, None)


@pytest.mark.parametrize("path", ["/", "/../..", "/kubepods/pod1/abc"])
def test_inside_a_container_the_root_is_its_own_cgroup(path):
    memory = read_memory({"": path}, root=str(TREES / "container"))
    assert memory is not None
    assert (memory.path if path != "/../.." else "/", memory.limit_bytes) == ("/", 16 * GIB)
    assert memory.oom_kills == 1


def test_unknown_is_none_and_never_zero():
    memory = read_memory({"": "/"}, root=str(TREES / "garbled"))
    assert memory is not None
    assert memory.usage_bytes is None
    assert memory.limit_bytes is None
    assert memory.oom_kills is None
    assert memory.pressure is None
    assert read_memory({"": "/"}, root=str(TREES)) is None
    assert read_memory({}, root=str(TREES / "v2")) is None
    assert read_pressure(TREES / "none") is None


def test_this_process_is_read_on_the_real_tree():
    paths = parse_proc_cgroup(Path(f"/proc/{os.getpid()}/cgroup").read_text())
    assert owner_path(paths) is not None
    memory = read_memory(paths)
    if memory is not None:
        assert memory.usage_bytes is None or memory.usage_bytes >= 0
