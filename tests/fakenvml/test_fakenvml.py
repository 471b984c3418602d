"""The scripted library itself, seen through the real binding."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import json, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
answers = []
for call in ({calls}):
    try:
        answers.append(str(call()))
    except pynvml.NVMLError as error:
        answers.append(type(error).__name__)
print(json.dumps(answers))
"""
GPU = "gpu 0 GPU-a 0:3b:0 NVIDIA H100\nmemory 0 0 80G 1G 70G\n"


def ask(fake_nvml, scenario, *calls):
    joined = "".join(f"lambda: pynvml.{call}, " for call in calls)
    return fake_nvml.run(scenario, PROBE.format(calls=joined))


def test_calls_that_it_does_not_have_fail_as_on_an_old_driver(fake_nvml):
    answers = ask(fake_nvml, GPU, "nvmlDeviceGetFanSpeed(handle)", "nvmlDeviceGetName(handle)")
    assert answers == ["NVMLError_FunctionNotFound", "NVIDIA H100"]


def test_errors_may_be_of_one_gpu_and_for_a_while(fake_nvml):
    scenario = GPU + "error nvmlDeviceGetName 15 0 1 2\n"
    read = "nvmlDeviceGetMemoryInfo(handle).total"
    name = "nvmlDeviceGetName(handle)"
    answers = ask(fake_nvml, scenario, name, read, name, read, name, read, name)
    assert answers[::2] == ["NVIDIA H100", "NVIDIA H100", "NVMLError_GpuIsLost", "NVIDIA H100"]


def test_a_memory_structure_of_another_version_is_refused(fake_nvml):
    answers = ask(fake_nvml, GPU, "nvmlDeviceGetMemoryInfo(handle, version=0x03000028)")
    assert answers == ["NVMLError_ArgumentVersionMismatch"]


def test_a_scenario_that_cannot_be_read_stops_the_program(fake_nvml):
    for scenario in ("gpu\n", "memory 0 0 1 1 1\n", "nonsense\n"):
        done = subprocess.run(
            [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
            env=fake_nvml.environment(scenario),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 70
        assert "fakenvml: " in done.stderr
