"""Calls of the NVIDIA driver by name, and what its errors mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Literal

NvmlOutcome = Literal[
    "ok",
    "no_driver",
    "library_mismatch",
    "no_permission",
    "gpu_lost",
    "unified_memory",
    "wsl",
    "hung",
    "not_available",
    "error",
]

WORST_FIRST: Final = (
    "no_driver",
    "library_mismatch",
    "gpu_lost",
    "no_permission",
    "error",
    "unified_memory",
)
"""Outcomes of single GPUs that decide that of the whole."""


class Call:
    """The call that a thread is in, for those who wait for it."""

    def __init__(self) -> None:
        self.enter("start")

    def enter(self, function: str, gpu: int | None = None) -> None:
        """A call of the driver is about to be made."""
        self._function, self._gpu, self.started = function, gpu, time.monotonic()

    @property
    def name(self) -> str:
        """As ``nvmlDeviceGetMemoryInfo of GPU 1``."""
        return self._function if self._gpu is None else f"{self._function} of GPU {self._gpu}"


class Driver:
    """Makes calls by name; what this board or driver does not offer gives None.

    Errors that concern the GPU as a whole (lost, no permission) are raised.
    """

    def __init__(self, pynvml: Any, call: Call) -> None:
        self.pynvml = pynvml
        self.gpu: int | None = None
        self._call = call
        self._none = (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            pynvml.NVML_ERROR_NOT_FOUND,
            pynvml.NVML_ERROR_NO_DATA,
            pynvml.NVML_ERROR_NOT_READY,
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        """The call's answer, bytes as text; None where it is not offered to us."""
        self._call.enter(name, self.gpu)
        function: Callable[..., Any] | None = getattr(self.pynvml, name, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self.pynvml.NVMLError as error:
            if error.value in self._none:
                return None
            if error.value == self.pynvml.NVML_ERROR_UNKNOWN and "MemoryInfo" not in name:
                return None
            # What an ordinary user may not see of a GPU is unknown, not a failure of the GPU.
            if error.value == self.pynvml.NVML_ERROR_NO_PERMISSION:
                return None
            raise
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def outcome_of(pynvml: Any, error: Exception) -> tuple[NvmlOutcome, str]:
    """The outcome that an NVML error stands for, and one line on it."""
    code = getattr(error, "value", None)
    outcomes: dict[int, tuple[NvmlOutcome, str]] = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("no_driver", "libnvidia-ml.so.1 is not installed"),
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("no_driver", "the NVIDIA driver is not loaded"),
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "library_mismatch",
            "driver library and kernel module differ in version: reboot, or reload the module",
        ),
        pynvml.NVML_ERROR_NO_PERMISSION: (
            "no_permission",
            "this user may not open /dev/nvidia*: check their permissions and the device cgroup",
        ),
        pynvml.NVML_ERROR_GPU_IS_LOST: ("gpu_lost", "it has fallen off the bus"),
        pynvml.NVML_ERROR_RESET_REQUIRED: ("gpu_lost", "it needs a reset"),
    }
    return outcomes.get(code or -1, ("error", f"NVML: {error}"))
