from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomwatch.sources.accelerators import find_accelerators
from oomwatch.units import GIB, MIB

READ = """
import dataclasses, json, os, sys
from oomwatch.sources.nvml import NvmlSession, Roots
roots = Roots(proc=os.environ.get("PROC", "/nowhere"), sys=os.environ.get("SYS", "/nowhere"),
              dev=os.environ.get("DEV", "/nowhere"))
session = NvmlSession(roots=roots)
readings = [dataclasses.asdict(session.read(float(os.environ.get("DEADLINE", "30"))))
            for _ in range(int(os.environ.get("READINGS", "1")))]
session.close()
print(json.dumps(readings))
"""
GPU0 = "gpu 0 GPU-aaaa 00000000:3B:00 NVIDIA H100 80GB HBM3\nmemory 0 0 80G 600M 70G\n"
GPU1 = "gpu 1 GPU-bbbb 00000000:5E:00 NVIDIA H100 80GB HBM3\nmemory 1 0 80G 600M 10G\n"


def reading(fake_nvml, scenario: str, **variables: str) -> dict[str, Any]:
    (only,) = fake_nvml.run(scenario, READ, **variables)
    return only


def tree(folder: Path, **files: str) -> str:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


# ---------------------------------------------------------------- figures
def test_all_figures_of_a_healthy_board(fake_nvml, tmp_path):
    proc = tree(tmp_path, **{"4242__comm": "VLLM::Worker_TP\n"})
    found = reading(
        fake_nvml,
        "driver 570.124.06\ncuda 12080\n"
        + GPU0
        + "sensors 0 97 61 412500\necc 0 1 2 3 4\nremapped 0 5 6 1 0\nxid 0 79\n"
        + "process 0 0 -1 4242 compute 69G\n",
        PROC=proc,
    )
    assert found["outcome"] == "ok"
    assert found["detail"] is None
    assert (found["driver_version"], found["cuda_version"]) == ("570.124.06", "12.8")
    (gpu,) = found["gpus"]
    sample = gpu["sample"]
    assert (sample["gpu"], sample["uuid"], sample["name"]) == (
        0,
        "GPU-aaaa",
        "NVIDIA H100 80GB HBM3",
    )
    assert sample["total_bytes"] == 80 * GIB
    assert sample["reserved_bytes"] == 600 * MIB
    assert sample["used_bytes"] == 70 * GIB
    assert (
        sample["used_bytes"] + sample["free_bytes"] + sample["reserved_bytes"]
        == sample["total_bytes"]
    )
    assert sample["utilization_ratio"] == 0.97
    assert sample["temperature_celsius"] == 61.0
    assert sample["power_watts"] == 412.5
    assert gpu["pci"] == "0000:3b:00"
    assert gpu["mig_enabled"] is False
    assert gpu["ecc"] == [1, 2, 3, 4]
    assert gpu["remapped_rows"] == [5, 6, True, False]
    assert gpu["reports_xid"] is True
    (process,) = found["processes"]
    assert (process["pid"], process["name"]) == (4242, "VLLM::Worker_TP")
    assert (process["used_bytes"], process["kind"]) == (69 * GIB, "compute")


def test_what_a_board_does_not_offer_is_none(fake_nvml):
    found = reading(fake_nvml, GPU0 + "error nvmlSystemGetCudaDriverVersion 13\n")
    (gpu,) = found["gpus"]
    assert found["outcome"] == "ok"
    assert found["cuda_version"] is None
    assert gpu["ecc"] is None
    assert gpu["remapped_rows"] is None
    for name in ("utilization_ratio", "temperature_celsius", "power_watts"):
        assert gpu["sample"][name] is None
    assert found["processes"] == []
    assert gpu["processes_known"] is True


def test_old_driver_without_memory_version_2(fake_nvml):
    found = reading(fake_nvml, GPU0 + "error nvmlDeviceGetMemoryInfo_v2 13\n")
    sample = found["gpus"][0]["sample"]
    assert sample["reserved_bytes"] is None
    assert sample["used_bytes"] == 70 * GIB + 600 * MIB
    assert sample["used_bytes"] + sample["free_bytes"] == sample["total_bytes"]


def test_old_driver_without_process_version_3(fake_nvml):
    processes = "process 0 0 -1 11 compute 2G\nprocess 0 0 -1 12 compute 3G\n"
    old = "".join(
        f"error nvmlDeviceGet{kind}RunningProcesses_v3 13\n"
        for kind in ("Compute", "Graphics", "MPSCompute")
    )
    found = reading(fake_nvml, GPU0 + processes + old)
    assert [(p["pid"], p["used_bytes"]) for p in found["processes"]] == [
        (11, 2 * GIB),
        (12, 3 * GIB),
    ]


def test_kinds_of_processes_each_once(fake_nvml):
    found = reading(
        fake_nvml,
        GPU0
        + "process 0 0 -1 11 compute 2G\nprocess 0 0 -1 11 graphics 2G\n"
        + "process 0 0 -1 12 graphics 300M\nprocess 0 0 -1 13 mps 5G\n",
    )
    assert [(p["pid"], p["kind"], p["used_bytes"]) for p in found["processes"]] == [
        (11, "compute", 2 * GIB),
        (12, "graphics", 300 * MIB),
        (13, "mps", 5 * GIB),
    ]


def test_timeline_of_memory_and_processes_that_come_and_go(fake_nvml):
    readings = fake_nvml.run(
        GPU0
        + "memory 0 1 80G 600M 75G\nprocess 0 0 2 11 compute 70G\nprocess 0 1 -1 12 compute 5G\n",
        READ,
        READINGS="3",
    )
    assert [r["gpus"][0]["sample"]["used_bytes"] // GIB for r in readings] == [70, 75, 75]
    assert [[p["pid"] for p in r["processes"]] for r in readings] == [[11], [11, 12], [12]]


def test_mig_instances_and_whose_processes_are_in_which(fake_nvml):
    found = reading(
        fake_nvml,
        GPU0
        + "mig 0 5 0 MIG-five 40G 10M 30G\nmig 0 7 0 MIG-seven 20G 10M 1G\n"
        + "process 0 0 -1 11 compute 29G 5 0\nprocess 0 0 -1 12 compute 1G 7 0\n",
    )
    (gpu,) = found["gpus"]
    assert gpu["mig_enabled"] is True
    assert [
        (i["sample"]["uuid"], i["gpu_instance"], i["sample"]["total_bytes"] // GIB)
        for i in gpu["instances"]
    ] == [("MIG-five", 5, 40), ("MIG-seven", 7, 20)]
    assert all(instance["sample"]["gpu"] == 0 for instance in gpu["instances"])
    assert [(p["pid"], p["mig"]) for p in found["processes"]] == [
        (11, "MIG-five"),
        (12, "MIG-seven"),
    ]


def test_figures_that_cannot_be_are_dropped(fake_nvml):
    found = reading(
        fake_nvml, GPU0 + "process 0 0 -1 1572864000 compute 79G\nprocess 0 0 -1 7 compute 9G\n"
    )
    assert found["outcome"] == "ok"
    assert "more memory than it has" in found["detail"]
    assert [p["used_bytes"] for p in found["processes"]] == [None, None]
    impossible = reading(fake_nvml, "gpu 0 GPU-a 0:1:0 X\nmemory 0 0 8G 0 9G\n")
    sample = impossible["gpus"][0]["sample"]
    assert (sample["total_bytes"], sample["used_bytes"]) == (8 * GIB, None)


# ---------------------------------------------------------------- outcomes, one each
def test_outcome_no_driver_without_the_library():
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    probe = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"
    if (
        subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode
        == 0
    ):
        pytest.skip("this host has an NVIDIA driver")
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True
    )
    (found,) = json.loads(done.stdout)
    assert found["outcome"] == "no_driver"
    assert "libnvidia-ml" in found["detail"]


@pytest.mark.parametrize(
    ("code", "outcome", "words"),
    [
        (9, "no_driver", "not loaded"),
        (18, "library_mismatch", "reboot"),
        (4, "no_permission", "/dev/nvidia"),
        (15, "gpu_lost", "bus"),
        (999, "error", "NVML"),
    ],
)
def test_outcome_of_initialisation(fake_nvml, code, outcome, words):
    found = reading(fake_nvml, f"error nvmlInitWithFlags {code}\n")
    assert found["outcome"] == outcome
    assert words in found["detail"]
    assert found["gpus"] == []


def test_driver_that_is_not_loaded_beside_an_nvidia_board(fake_nvml, tmp_path):
    sys_root = tree(
        tmp_path,
        **{
            "bus__pci__devices__0000:3b:00.0__vendor": "0x10de\n",
            "bus__pci__devices__0000:3b:00.0__class": "0x030200\n",
        },
    )
    found = reading(fake_nvml, "error nvmlInitWithFlags 9\n", SYS=sys_root)
    assert found["outcome"] == "no_driver"
    assert "an NVIDIA GPU is in this host" in found["detail"]


def test_outcome_gpu_lost_keeps_the_other_gpus(fake_nvml):
    found = reading(fake_nvml, GPU0 + GPU1 + "error nvmlDeviceGetMemoryInfo_v2 15 0\n")
    assert found["outcome"] == "gpu_lost"
    assert found["detail"].startswith("GPU 0:")
    assert [gpu["outcome"] for gpu in found["gpus"]] == ["gpu_lost", "ok"]
    assert found["gpus"][0]["sample"]["used_bytes"] is None
    assert found["gpus"][1]["sample"]["used_bytes"] == 10 * GIB


def test_outcome_gpu_lost_between_two_readings(fake_nvml):
    readings = fake_nvml.run(
        GPU0 + "error nvmlDeviceGetUtilizationRates 16 0 1 2\n", READ, READINGS="3"
    )
    assert [r["outcome"] for r in readings] == ["ok", "gpu_lost", "ok"]
    assert "reset" in readings[1]["detail"]


def test_outcome_no_permission_of_one_gpu(fake_nvml):
    found = reading(fake_nvml, GPU0 + GPU1 + "error nvmlDeviceGetHandleByIndex_v2 4 1\n")
    assert found["outcome"] == "no_permission"
    assert [gpu["outcome"] for gpu in found["gpus"]] == ["ok", "no_permission"]


def test_outcome_unified_memory(fake_nvml):
    found = reading(
        fake_nvml, "gpu 0 GPU-gb10 0000000f:01:00 NVIDIA GB10\nprocess 0 0 -1 11 compute 30G\n"
    )
    assert found["outcome"] == "unified_memory"
    sample = found["gpus"][0]["sample"]
    assert (sample["total_bytes"], sample["used_bytes"], sample["free_bytes"]) == (None, None, None)
    assert found["processes"][0]["used_bytes"] == 30 * GIB


def test_memory_that_fails_is_not_taken_for_unified(fake_nvml):
    found = reading(fake_nvml, GPU0 + "error nvmlDeviceGetMemoryInfo_v2 999\n")
    assert found["outcome"] == "error"


@pytest.mark.parametrize("how", ["hidden", "not supported"])
def test_outcome_wsl(fake_nvml, tmp_path, how):
    dev = tree(tmp_path, dxg="")
    if how == "hidden":
        scenario = GPU0 + "process 0 0 -1 11 compute hidden\n"
    else:
        scenario = GPU0 + "".join(
            f"error nvmlDeviceGet{kind}RunningProcesses_{version} 3\n"
            for kind in ("Compute", "Graphics", "MPSCompute")
            for version in ("v2", "v3")
        )
    found = reading(fake_nvml, scenario, DEV=dev)
    assert found["outcome"] == "wsl"
    assert found["gpus"][0]["sample"]["used_bytes"] == 70 * GIB
    assert all(process["used_bytes"] is None for process in found["processes"])
    elsewhere = reading(fake_nvml, scenario)
    assert elsewhere["outcome"] == "ok"
    assert elsewhere["gpus"][0]["processes_known"] is False


def test_outcome_hung_names_the_call_and_keeps_what_was_read(fake_nvml):
    readings = fake_nvml.run(
        GPU0 + GPU1 + "delay nvmlDeviceGetMemoryInfo_v2 -1 1\n",
        READ,
        DEADLINE="2",
        READINGS="2",
    )
    assert [r["outcome"] for r in readings] == ["hung", "hung"]
    assert "nvmlDeviceGetMemoryInfo of GPU 1" in readings[0]["detail"]
    assert [gpu["sample"]["gpu"] for gpu in readings[0]["gpus"]] == [0]
    assert readings[1]["gpus"] == []


def test_slow_calls_within_the_deadline_are_not_hung(fake_nvml):
    # Four calls of 2.5 s: longer together than the deadline of each, which is far from each.
    delays = "".join(
        f"delay {call} 2500\n"
        for call in (
            "nvmlInitWithFlags",
            "nvmlDeviceGetCount_v2",
            "nvmlDeviceGetName",
            "nvmlDeviceGetUUID",
        )
    )
    found = reading(fake_nvml, GPU0 + delays, DEADLINE="9")
    assert found["outcome"] == "ok"


@pytest.mark.parametrize(
    ("files", "vendor"),
    [
        ({"sys__class__drm__card0__device__vendor": "0x1002\n"}, "AMD"),
        ({"dev__kfd": ""}, "AMD"),
        ({"dev__davinci0": ""}, "Huawei Ascend"),
        (
            {
                "sys__bus__pci__devices__0000:4d:00.0__vendor": "0x8086\n",
                "sys__bus__pci__devices__0000:4d:00.0__class": "0x038000\n",
            },
            "Intel",
        ),
        (
            {
                "sys__bus__pci__devices__0000:4d:00.0__vendor": "0x1da3\n",
                "sys__bus__pci__devices__0000:4d:00.0__class": "0x120000\n",
            },
            "Intel Gaudi",
        ),
    ],
)
def test_outcome_not_available_for_other_makes(fake_nvml, tmp_path, files, vendor):
    tree(tmp_path, **files)
    found = reading(
        fake_nvml,
        "error nvmlInitWithFlags 9\n",
        SYS=str(tmp_path / "sys"),
        DEV=str(tmp_path / "dev"),
    )
    assert found["outcome"] == "not_available"
    assert found["other_vendors"] == [vendor]
    assert vendor in found["detail"]


def test_other_makes_beside_nvidia_are_told_and_do_not_hide_it(fake_nvml, tmp_path):
    dev = tree(tmp_path, kfd="")
    found = reading(fake_nvml, GPU0, DEV=dev)
    assert (found["outcome"], found["other_vendors"]) == ("ok", ["AMD"])


def test_network_cards_and_server_graphics_are_no_accelerators(tmp_path):
    tree(
        tmp_path,
        **{
            "bus__pci__devices__0000:00:01.0__vendor": "0x8086\n",
            "bus__pci__devices__0000:00:01.0__class": "0x020000\n",
            "bus__pci__devices__0000:00:02.0__vendor": "0x1a03\n",
            "bus__pci__devices__0000:00:02.0__class": "0x030000\n",
        },
    )
    assert find_accelerators(sys_root=str(tmp_path), dev_root=str(tmp_path)) == ()


def test_driver_without_a_gpu(fake_nvml):
    found = reading(fake_nvml, "driver 580.65.06\n")
    assert (found["outcome"], found["gpus"]) == ("ok", [])


# ---------------------------------------------------------------- Xids
def test_xids_arrive_once_with_their_gpu(fake_nvml):
    found = fake_nvml.run(
        GPU0 + GPU1 + "xid 1 31\nxid 1 43 5 0\n",
        """
import dataclasses, json
from oomwatch.sources.nvml import XidWatcher
watcher = XidWatcher()
events = [watcher.wait(0.01) for _ in range(3)]
print(json.dumps([watcher.gpus, *(e and dataclasses.asdict(e) for e in events)]))
watcher.close()
""",
    )
    gpus, first, second, third = found
    assert gpus == [1]
    assert (first["gpu"], first["uuid"], first["xid"]) == (1, "GPU-bbbb", 31)
    assert first["gpu_instance"] is None
    assert (second["xid"], second["gpu_instance"], second["compute_instance"]) == (43, 5, 0)
    assert third is None


# ---------------------------------------------------------------- the binding
def test_deprecated_distribution_is_a_debug_note_and_no_warning(fake_nvml, tmp_path):
    info = tmp_path / "pynvml-13.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\nVersion: 13.0.1\n")
    # What its import hook does: warn in the importer's name, then give the real binding.
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, warnings\n"
        "real = builtins.__import__\n"
        "def hooked(name, *rest, **more):\n"
        "    if name == 'pynvml':\n"
        "        warnings.warn('The pynvml package is deprecated. Please install nvidia-ml-py'\n"
        "                      ' instead.', FutureWarning, stacklevel=2)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = hooked\n"
    )
    script = """
import json, logging
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("oomwatch").addHandler(handler)
logging.getLogger("oomwatch").setLevel(logging.DEBUG)
from oomwatch.sources.nvml import read_gpus
reading = read_gpus()
print(json.dumps([reading.outcome, [r.levelname + " " + r.getMessage() for r in records]]))
"""
    outcome, records = fake_nvml.run(GPU0, script, PYTHONPATH=str(tmp_path))
    assert outcome == "ok"
    assert any(r.startswith("DEBUG") and "deprecated package pynvml" in r for r in records)


def test_this_host_is_read_or_the_reason_named():
    from oomwatch.sources.nvml import read_gpus

    found = read_gpus()
    assert found.outcome
    assert found.gpus or found.detail or found.outcome == "ok"
