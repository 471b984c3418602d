"""The shipped unit under a real systemd; what is checked stands in inside.sh."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run-under-systemd.sh"


def test_the_unit_under_a_real_systemd():
    done = subprocess.run(
        [SCRIPT, sys.executable], capture_output=True, text=True, check=False, timeout=240
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
