"""Builds the scripted NVML library and runs programs that load it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "fakenvml.c"


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


class FakeNvml:
    """The library in `folder`, which is made if needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = folder / "libnvidia-ml.so.1"
        self._scenarios = 0
        command = [compiler(), "-std=c11", "-Wall", "-Wextra", "-O1", "-shared", "-fPIC"]
        command += ["-Wl,-soname,libnvidia-ml.so.1", "-o", str(self.library), str(SOURCE)]
        subprocess.run(command, check=True)

    def environment(self, scenario: str) -> dict[str, str]:
        """Variables under which a new process sees the scenario's GPUs."""
        self._scenarios += 1
        path = self.folder / f"scenario-{self._scenarios}.txt"
        path.write_text(scenario)
        return os.environ | {
            "LD_LIBRARY_PATH": str(self.folder),
            "FAKENVML_SCENARIO": str(path),
        }

    def run(self, scenario: str, script: str, **variables: str) -> Any:
        """What a Python script printed, as JSON, on a host with the scenario's GPUs."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env=self.environment(scenario) | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
