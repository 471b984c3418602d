"""The units: systemd's own verdict on them, and `oomwatch service` on trees of files."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from oomwatch.cli import unit_files
from oomwatch.cli.unit_files import DROP_INS, Layout, owner, stamp, unreachable

ROOT = Path(__file__).parent.parent
UNITS = ROOT / "oomwatch" / "systemd"
EXEC = "/opt/oomwatch/bin/oomwatch"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run(*arguments, **environ):
    code = (
        "import oomwatch.cli as c; c.COMMANDS.setdefault('service', '')\n"
        "from oomwatch import __main__ as m; m.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "service", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environ,
    )


@pytest.fixture
def tree(tmp_path):
    """The root of a small system with the usual groups."""
    (tmp_path / "etc").mkdir()
    groups = "root:x:0:\nadm:x:4:\nsystemd-journal:x:101:\ndocker:x:998:op\nrender:x:105:\n"
    (tmp_path / "etc" / "group").write_text(groups)
    return tmp_path


def files(tree):
    units = tree / "etc" / "systemd" / "system"
    return sorted(path.relative_to(units).as_posix() for path in units.rglob("*") if path.is_file())


def install(tree, *arguments, status=0):
    done = run("install", "--root", tree, "--exec-path", EXEC, *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


# ---------------------------------------------------------------- the files
def directives(path):
    """Directive names of a unit with the comment above each, as (section, name, comment)."""
    section, comment = "", ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section, comment = line, ""
        elif line.startswith("#"):
            comment = line
        elif "=" in line:
            yield section, line.partition("=")[0], comment
        else:
            comment = ""


def test_every_line_of_the_sandbox_has_its_reason():
    """Lines under one comment share it; no line of [Service] stands without."""
    lines = [
        name
        for section, name, comment in directives(UNITS / "oomwatch.service")
        if section == "[Service]" and not comment and name not in {"Type", "NotifyAccess"}
    ]
    assert lines == []


@pytest.mark.parametrize("name", DROP_INS)
def test_every_drop_in_says_what_it_gives(name):
    text = (UNITS / "drop-ins" / f"{name}.conf").read_text()
    assert len(re.findall(r"^# ", text, re.MULTILINE)) >= 2
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    assert parser.sections() == ["Service"]


def test_the_shipped_drop_ins_are_those_that_can_be_installed():
    assert {path.stem for path in (UNITS / "drop-ins").iterdir()} == set(DROP_INS)


@pytest.fixture
def rendered(tmp_path):
    """The unit with a program that exists, since systemd-analyze looks for it."""

    def render(*drop_ins, name="oomwatch.service"):
        text = (UNITS / name).read_text().replace("/usr/bin/oomwatch", "/bin/true")
        path = tmp_path / "oomwatch.service"
        path.write_text(text)
        folder = tmp_path / "oomwatch.service.d"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for drop_in in drop_ins:
            shutil.copy(UNITS / "drop-ins" / f"{drop_in}.conf", folder)
        return path

    return render


def analyze(*arguments, **environ):
    done = subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environ,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is too old")
    return done


@needs_systemd
@pytest.mark.parametrize("drop_ins", [(), *((name,) for name in DROP_INS), DROP_INS])
def test_systemd_has_nothing_to_say_about_the_unit(rendered, drop_ins):
    done = analyze("verify", rendered(*drop_ins))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_systemd_would_say_something(rendered):
    path = rendered()
    path.write_text(path.read_text().replace("MemoryMax=", "MemoryMost="))
    assert "MemoryMost" in analyze("verify", path).stderr


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_unit_of_a_user(rendered, tmp_path):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    path = rendered(name="user/oomwatch.service")
    done = analyze("--user", "verify", path, XDG_RUNTIME_DIR=str(runtime))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize(
    ("drop_ins", "most"),
    [((), 2.0), (("logs",), 2.0), (("docker",), 2.0), (("kernel-log",), 2.0), (DROP_INS, 2.5)],
)
def test_exposure(rendered, drop_ins, most):
    """systemd's measure from 0 to 10; 2.0 is the limit for the unit as it is shipped."""
    path = rendered(*drop_ins)
    done = analyze("security", "--offline=true", f"--threshold={round(most * 10)}", path)
    score = re.search(r"Overall exposure level for \S+: (\d+\.\d)", done.stdout)
    assert score, done.stdout + done.stderr
    assert done.returncode == 0, score.group()
    assert float(score.group(1)) <= most


# ---------------------------------------------------------------- install
def test_install_writes_the_unit_with_the_program_and_says_what_is_left(tree):
    done = install(tree)
    assert files(tree) == ["oomwatch.service"]
    path = tree / "etc/systemd/system/oomwatch.service"
    assert f"ExecStart={EXEC} agent\n" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    assert owner(path) == "ours"
    assert "would run systemctl enable oomwatch.service" in done.stdout
    assert f"note: there is no {EXEC} below {tree}" in done.stdout


def test_a_program_that_is_in_the_tree_needs_no_note(tree):
    program = tree / "srv/50% of $HOME/oomwatch"
    program.parent.mkdir(parents=True)
    program.touch()
    done = run("install", "--root", tree, "--exec-path", "/srv/50% of $HOME/oomwatch")
    assert "note: there is no" not in done.stdout
    assert "problem" not in run("status", "--root", tree).stdout


def test_a_user_is_told_at_once_of_a_program_that_is_not_there(tmp_path):
    done = run("install", "--user", "--dry-run", "--exec-path", f"{tmp_path}/oomwatch")
    assert (done.returncode, done.stderr) == (2, f"oomwatch: there is no {tmp_path}/oomwatch\n")


def test_a_dry_run_writes_nothing(tree):
    done = install(tree, "--dry-run", "--with", "logs")
    assert done.stdout.count("would write") == 2
    assert not (tree / "etc/systemd").exists()


def test_drop_ins_are_chosen_kept_and_dropped(tree):
    install(tree, "--with", "logs,docker")
    both = [
        "oomwatch.service",
        *(f"oomwatch.service.d/50-oomwatch-{n}.conf" for n in ("docker", "logs")),
    ]
    assert files(tree) == both
    install(tree)
    assert files(tree) == both
    done = install(tree, "--with", "kernel-log")
    assert files(tree) == ["oomwatch.service", "oomwatch.service.d/50-oomwatch-kernel-log.conf"]
    assert "50-oomwatch-docker.conf" in done.stdout
    install(tree, "--with", "none")
    assert files(tree) == ["oomwatch.service"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("log", "there is no drop-in 'log'"),
        ("logs,docker", "the drop-in docker needs the group docker"),
    ],
)
def test_a_drop_in_that_cannot_be(tree, names, expected):
    (tree / "etc/group").write_text("adm:x:4:\nsystemd-journal:x:101:\n")
    done = install(tree, "--with", names, status=2)
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tree / "etc/systemd").exists()


def test_a_host_without_the_journals_group(tree):
    (tree / "etc/group").write_text("root:x:0:\n")
    done = install(tree)
    assert "note: there is no group systemd-journal here" in done.stdout
    text = (tree / "etc/systemd/system/oomwatch.service").read_text()
    assert "\n#SupplementaryGroups=systemd-journal\n" in text


@as_root
def test_device_nodes_kept_for_a_group_get_a_drop_in(tree):
    (tree / "dev").mkdir()
    node = tree / "dev/nvidiactl"
    node.touch()
    node.chmod(0o660)
    os.chown(node, 0, 105)
    install(tree)
    text = (tree / "etc/systemd/system/oomwatch.service.d/50-oomwatch-gpu-group.conf").read_text()
    assert "SupplementaryGroups=render\n" in text
    node.chmod(0o666)
    install(tree)
    assert files(tree) == ["oomwatch.service"]


def test_install_again_is_fine_and_another_program_replaces_the_first(tree):
    install(tree)
    done = run("install", "--root", tree, "--exec-path", "/srv/50% of $HOME/oomwatch")
    assert done.returncode == 0
    text = (tree / "etc/systemd/system/oomwatch.service").read_text()
    assert 'ExecStart="/srv/50%% of $$HOME/oomwatch" agent\n' in text


@pytest.mark.parametrize(
    "path", ["bin/oomwatch", "/opt/a\nb/oomwatch", "/opt/\x1b[2J/oomwatch", "/usr/bin/true"]
)
def test_a_program_that_no_unit_can_name(tree, path):
    done = run("install", "--root", tree, "--exec-path", path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tree / "etc/systemd").exists()


# ---------------------------------------------------------------- units of others
def make_foreign(path):
    path.write_text("[Service]\nExecStart=/bin/true\n")


def make_edited(path):
    path.write_text(path.read_text().replace("MemoryMax=256M", "MemoryMax=1G"))


def make_masked(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (make_foreign, "was not written by oomwatch"),
        (make_edited, "was edited since oomwatch wrote it"),
        (make_masked, "is a link"),
    ],
)
@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_what_is_not_ours_is_left_alone(tree, change, expected, command):
    install(tree, "--with", "logs")
    path = tree / "etc/systemd/system/oomwatch.service"
    change(path)
    before = (path.is_symlink(), path.read_bytes(), files(tree))
    arguments = ("--exec-path", EXEC) if command == "install" else ()
    done = run(command, "--root", tree, *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert (path.is_symlink(), path.read_bytes(), files(tree)) == before


def test_nothing_is_written_beside_a_foreign_drop_in(tree):
    path = tree / "etc/systemd/system/oomwatch.service.d/50-oomwatch-logs.conf"
    path.parent.mkdir(parents=True)
    make_foreign(path)
    done = install(tree, "--with", "logs", status=2)
    assert str(path) in done.stderr
    assert files(tree) == ["oomwatch.service.d/50-oomwatch-logs.conf"]


def test_a_packages_unit_is_left_in_charge(tree):
    folder = tree / "usr/lib/systemd/system"
    folder.mkdir(parents=True)
    make_foreign(folder / "oomwatch.service")
    done = install(tree, status=2)
    assert "came with a package: use that one" in done.stderr
    shown = run("status", "--root", tree).stdout
    assert "from a package" in shown


def test_a_place_that_cannot_be_written(tree):
    (tree / "etc/systemd").write_text("a file")
    done = install(tree, status=2)
    assert "cannot write" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_uninstall_removes_ours_and_keeps_drop_ins_of_others(tree):
    install(tree, "--with", "logs,other-users")
    other = tree / "etc/systemd/system/oomwatch.service.d/override.conf"
    other.write_text("[Service]\nMemoryMax=1G\n")
    would = run("uninstall", "--root", tree, "--dry-run").stdout
    assert would.count("would remove") == 3
    done = run("uninstall", "--root", tree)
    assert done.returncode == 0
    assert files(tree) == ["oomwatch.service.d/override.conf"]
    assert "kept: /etc/oomwatch and /var/lib/oomwatch" in done.stdout
    other.unlink()
    again = run("uninstall", "--root", tree)
    assert (again.returncode, "nothing to remove" in again.stdout) == (0, True)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "oomwatch.service"
    unit_files.write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        unit_files.write_atomically(path, "new \udcff\n")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mark_tells_ours_from_edited(tmp_path):
    path = tmp_path / "u"
    path.write_text(stamp("[Unit]\n"))
    assert owner(path) == "ours"
    path.write_text(stamp("[Unit]\n") + "\n")
    assert owner(path) == "edited"
    path.write_bytes(b"\xff\xfe")
    assert owner(path) == "foreign"
    assert owner(tmp_path) == "foreign"
    assert owner(tmp_path / "none") == "absent"


# ---------------------------------------------------------------- status
def test_status(tree):
    def status():
        document = json.loads(run("status", "--root", tree, "--json").stdout)
        assert document["schema"] == "oomwatch.service/1"
        return document

    assert status()["origin"] == "not installed"
    install(tree, "--with", "logs")
    found = status()
    assert found["origin"] == "written by oomwatch"
    assert found["drop_ins"] == ["logs"]
    assert found["command"] == f"{EXEC} agent"
    assert f"there is no {EXEC} below {tree}" in found["problem"]
    program = tree / EXEC.lstrip("/")
    program.parent.mkdir(parents=True)
    program.touch()
    assert "problem" not in status()
    path = tree / "etc/systemd/system/oomwatch.service"
    older = path.read_text().partition("\n[Unit]")[2].replace("TasksMax=64", "TasksMax=32")
    path.write_text(stamp(f"[Unit]{older}"))
    assert "another version wrote it" in status()["problem"]
    make_edited(path)
    assert status()["origin"] == "written by oomwatch and edited since"
    assert "written by oomwatch" in run("status", "--root", tree).stdout


# ---------------------------------------------------------------- without root
def test_a_service_of_ones_own(tree):
    environ = {"HOME": "/home/op", "XDG_CONFIG_HOME": ""}
    done = run("install", "--user", "--root", tree, "--exec-path", EXEC, **environ)
    assert done.returncode == 0
    path = tree / "home/op/.config/systemd/user/oomwatch.service"
    text = path.read_text()
    assert f"ExecStart={EXEC} agent" in text
    assert "DynamicUser" not in text
    assert "WantedBy=default.target" in text
    assert "loginctl enable-linger" in done.stdout
    assert "would run systemctl --user enable" in done.stdout
    assert run("uninstall", "--user", "--root", tree, **environ).returncode == 0
    assert not path.exists()


def test_a_user_has_no_powers_to_give(tree):
    done = run("install", "--user", "--root", tree, "--with", "docker")
    assert done.returncode == 2
    assert "--with is for the system's service" in done.stderr


@as_root
@pytest.mark.skipif(shutil.which("runuser") is None, reason="runuser is not installed")
def test_without_root_it_says_what_to_do(tmp_path):
    """Another user, with this interpreter's packages copied to where that user can read them."""
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip(f"{python} is not there for another user to run")
    import click

    source = tmp_path / "source"
    shutil.copytree(ROOT / "oomwatch", source / "oomwatch", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(Path(click.__file__).parent, source / "click")
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "import oomwatch.cli as c; c.COMMANDS.setdefault('service', '')\n"
        "from oomwatch import __main__ as m; m.main()"
    )
    line = ["runuser", "-u", "nobody", "--", python, "-c", code, "service", "install"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 2, done.stderr
    assert "a system service needs root: run it with sudo" in done.stderr
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        program = Path(folder, "oomwatch")
        program.touch()
        program.chmod(0o755)
        dry = [*line, "--dry-run", "--exec-path", str(program)]
        done = subprocess.run(dry, capture_output=True, text=True, check=False, cwd="/")
    assert "would write /etc/systemd/system/oomwatch.service" in done.stdout + done.stderr


# ---------------------------------------------------------------- can the service run it?
def test_programs_that_a_service_cannot_reach():
    assert "below /tmp" in (unreachable(("/tmp/oomwatch",)) or "")
    assert "below /root" in (unreachable(("/root/.local/bin/oomwatch",)) or "")
    assert "no such file" in (unreachable(("/opt/no-such/oomwatch",)) or "")
    assert unreachable(("/usr/bin/env",)) is None


def test_programs_behind_a_closed_door():
    # Temporary folders of pytest are closed themselves; this one is open above.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        closed = Path(folder)
        program = closed / "oomwatch"
        program.write_text("#!/usr/bin/env python3\n")
        program.chmod(0o755)
        assert unreachable((str(program),)) == f"{closed} is closed to other users"
        closed.chmod(0o755)
        program.chmod(0o700)
        assert unreachable((str(program),)) == f"{program} is closed to other users"
        program.chmod(0o755)
        program.write_text("#!/root/python3\n")
        assert "below /root" in (unreachable((str(program),)) or "")
        link = closed / "link"
        link.symlink_to("/root/oomwatch")
        assert "below /root" in (unreachable((str(link),)) or "")


def test_the_running_program_is_found():
    (program,) = unit_files.find_command()
    assert Path(program).name == "oomwatch"
    assert os.access(program, os.X_OK)


def test_layouts_do_not_leave_their_tree(tree):
    layout = Layout(tree, user=False)
    assert layout.unit.is_relative_to(tree)
    assert layout.drop_in("logs").is_relative_to(tree)
