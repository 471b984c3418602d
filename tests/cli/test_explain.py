from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from oomwatch.causes import CAUSES
from oomwatch.report.pages import page, title

RUN = "from oomwatch.cli.explain import command; command(prog_name='oomwatch explain')"


def explain(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environ}
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env=env,
        text=True,
        encoding="utf-8",
        capture_output=True,
        check=False,
    )


def on_terminal(*arguments: str, **environ: str) -> str:
    """What the command prints where stdout is a terminal."""
    leader, follower = pty.openpty()
    env = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "COLUMNS": "80",
        **environ,
    }
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], env=env, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            if not chunk:
                break
            seen += chunk
    os.close(leader)
    assert process.returncode == 0
    return seen.decode("utf-8")


def test_a_pipe_gets_the_page_as_it_is() -> None:
    done = explain("kv_lt_max_len")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == page("kv_lt_max_len", "en")


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [(("--lang", "zh"), {}), ((), {"LANG": "zh_CN.UTF-8"}), ((), {"LC_ALL": "zh_CN.UTF-8"})],
)
def test_the_page_in_chinese(arguments: tuple[str, ...], environ: dict[str, str]) -> None:
    assert explain("kv_saturation", *arguments, **environ).stdout == page("kv_saturation", "zh")


def test_a_terminal_gets_formatted_text() -> None:
    text = on_terminal("kv_lt_max_len")
    assert "\x1b[" in text
    assert "## " not in text
    assert "What to do" in text
    assert "\x1b[3" not in on_terminal("kv_lt_max_len", NO_COLOR="1")


def test_the_list_names_every_cause_under_its_class() -> None:
    done = explain()
    assert done.returncode == 0
    listed = re.findall(r"^  ([a-z_]+) ", done.stdout, re.MULTILINE)
    assert listed == [cause for causes in CAUSES.values() for cause in causes]
    assert done.stdout.startswith("Start-up\n")
    assert title("fragmentation", "zh") in explain("--lang", "zh").stdout


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("kv_lt_maxlen", "did you mean kv_lt_max_len?"),
        ("host-oom-kil", "did you mean host_oom_kill?"),
        ("kv_l", "did you mean kv_lt_max_len?"),
        ("cuda", "did you mean cuda_graph_capture?"),
        ("kv_preempt", "did you mean kv_preempt_recompute_storm or kv_preempt_swap_storm?"),
        ("zzz", "`oomwatch explain` lists all"),
        ("../../etc/passwd", "lists all"),
    ],
)
def test_an_unknown_cause_is_one_line_and_status_2(typed: str, hint: str) -> None:
    done = explain(typed)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert hint in done.stderr


def test_hostile_names_print_no_escapes() -> None:
    done = explain("\x1b[31mkv\u202e")
    assert done.returncode == 2
    assert done.stderr[:-1].isprintable()


def test_dashes_and_capitals_are_forgiven() -> None:
    assert explain("KV-lt-max-len").stdout == page("kv_lt_max_len", "en")


def test_help_has_examples() -> None:
    text = explain("--help").stdout
    assert "oomwatch explain kv_lt_max_len" in text
