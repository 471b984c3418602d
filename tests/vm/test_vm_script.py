"""Why the test in the virtual machine cannot run is said in one line; the test itself is `make vm`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run.sh"


def test_a_missing_program_is_named_with_its_package(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not there")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("dirname", "readlink", "uname", "id"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    for name, answer in (("uname", "Linux x86_64"), ("id", "0")):  # on any machine, by any user
        (programs / name).unlink()
        (programs / name).write_text(f"#!{bash}\necho {answer}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [bash, SCRIPT, tmp_path / "cache", sys.executable],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 77
    assert done.stdout == "skipped: debootstrap is not installed (package debootstrap)\n"
    assert done.stderr == ""
    assert not (tmp_path / "cache").exists()
