"""The wheel: what is in it, and that it works away from this tree."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the build backend is not installed")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--quiet", "--wheel-dir", str(target), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_package_is_inside_and_nothing_else(names):
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "oomwatch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == tree


@pytest.mark.parametrize(
    "pattern",
    [
        r"oomwatch/py\.typed",
        r"oomwatch/demo/recording/manifest\.json",
        r"oomwatch/demo/recording/logs/server\.log",
        r"oomwatch/report/schema/.+\.json",
        r"oomwatch/report/pages/en/.+\.md",
        r"oomwatch/report/pages/zh/.+\.md",
        r"oomwatch/engines/data/.+\.json",
        r"oomwatch-.+\.dist-info/licenses/LICENSE",
    ],
)
def test_data_files_are_inside(names, pattern):
    assert any(re.fullmatch(pattern, name) for name in names)


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(("METADATA", "entry_points.txt"))
        }
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Requires-Python: >=3.11" in texts["METADATA"]
    assert "oomwatch = oomwatch.__main__:main" in texts["entry_points.txt"]


def test_the_wheel_works_away_from_the_tree(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import oomwatch\n"
        "from oomwatch.demo import demo_recording\n"
        "from oomwatch.sources.recording import read_recording\n"
        "recording = read_recording(str(demo_recording()))\n"
        "print(oomwatch.__file__, len(recording.series.gpus), recording.problems)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.startswith(str(tmp_path))
    assert done.stdout.rstrip().endswith(" 57 ()")


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_constraints_name_one_version_each():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+", line) for line in pins)
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in pins}
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'^    "([A-Za-z0-9._-]+)[>=<~!"]', project, re.MULTILINE)
    direct = {re.sub(r"[-_.]+", "-", name).lower() for name in wanted if "::" not in name}
    missing = {name for name in direct if name not in pinned and f'"{name}>=' in project.lower()}
    assert not missing
