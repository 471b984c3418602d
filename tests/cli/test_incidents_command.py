"""`oomwatch incidents` on real stores."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from stored_incidents import a_store, refused, started

from oomwatch.cli import cli
from oomwatch.errors import NoInputError
from oomwatch.records import (
    Diagnosis,
    EngineFacts,
    Evidence,
    Finding,
    Incident,
    Remedy,
    StoredIncident,
    Trigger,
)
from oomwatch.report.json_report import to_json
from oomwatch.store.writer import StoreWriter

AT = 1_764_400_000.0
HOSTILE = "\x1b[31mred\x07 \u202eeval\x9b2J\r\nnext"


def diagnosis(at: float = AT) -> Diagnosis:
    finding = Finding(
        "long_context",
        "prefill_activation_peak",
        0.9,
        "a long prompt needed 2 GiB",
        (Evidence("log", "server.log:12", at, "CUDA out of memory"),),
        engine_id="vllm-0",
        at=at,
    )
    remedy = Remedy(
        "chunk",
        "Take smaller chunks",
        "less_kv",
        "why",
        "slower",
        {"--max-num-batched-tokens": "2048"},
        valid_for="vllm",
        validated=True,
    )
    return Diagnosis(
        "oom",
        at,
        "gpu-box",
        engines=(EngineFacts("vllm-0", "vllm", version="0.11.0"),),
        incidents=(Incident("i-1", finding, remedies=(remedy,)),),
    )


def incident(name: str, at: float, **fields) -> StoredIncident:
    values = {
        "fingerprint": "vllm-0/failure",
        "state": "open",
        "engine_id": "vllm-0",
        "host": "gpu-box",
        "triggers": (Trigger("log_failure", at, "vllm-0", text=f"it failed at {name}"),),
        "window_from": at - 600,
        "window_to": at + 60,
    }
    return StoredIncident(id=f"inc-{name}", opened_at=at, **{**values, **fields})


@pytest.fixture
def stored(tmp_path: Path):
    """Writes incidents; the path of the store."""

    def write(*incidents: StoredIncident) -> str:
        writer = StoreWriter(str(tmp_path / "oomwatch.db"), "gpu-box", interval_seconds=0.05)
        writer.start()
        for one in incidents:
            writer.save_incident(one)
        assert writer.flush(30)
        assert writer.stop(30)
        return str(tmp_path / "oomwatch.db")

    return write


def run(*arguments: str):
    return CliRunner().invoke(cli, ["incidents", *arguments], catch_exceptions=True)


# ------------------------------------------------------------------------------- list
def test_the_newest_stands_first(stored):
    path = stored(
        incident("aaa111", AT), incident("bbb222", AT + 60, state="closed", closed_at=AT + 90)
    )
    for arguments in (["--store", path], ["list", "--store", path], ["--store", path, "list"]):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        assert [line.split()[0] for line in done.output.splitlines()] == [
            "ID",
            "inc-bbb222",
            "inc-aaa111",
        ]
    (_, only) = run("list", "--open", "--store", path).output.splitlines()
    assert only.startswith("inc-aaa111")


def test_columns_stand_below_their_names_with_the_zone_of_times(stored, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        path = stored(incident("aaa111", AT), incident("bbb222", AT, engine_id="a-long-name"))
        lines = run("list", "--store", path).output.splitlines()
    finally:
        monkeypatch.undo()
        time.tzset()
    for name, values in {
        "OPENED": {"2025-11-29 15:06:40 CST"},
        "SEVERITY": {"critical"},
        "ENGINE": {"vllm-0", "a-long-name"},
        "WHAT": {"it failed at aaa111", "it failed at bbb222"},
    }.items():
        column = lines[0].index(name)
        assert {line[column:].partition("  ")[0] for line in lines[1:]} == values


def test_choices_narrow_it_down(stored):
    now = time.time()
    path = stored(
        incident("aaa111", AT),
        incident("bbb222", now - 60, engine_id="other"),
        *(incident(f"c{number:05}", now - 7200 - number) for number in range(70)),
    )
    assert len(run("list", "--store", path).output.splitlines()) == 1 + 50
    assert len(run("list", "--limit", "72", "--store", path).output.splitlines()) == 1 + 72
    assert len(run("list", "--since", "1h", "--store", path).output.splitlines()) == 1 + 1
    assert "bbb222" in run("list", "--engine", "other", "--store", path).output
    assert run("list", "--limit", "0", "--store", path).exit_code == 2


def test_an_empty_store_has_none(stored):
    assert run("--store", stored()).output == "no incidents\n"


def test_json_has_its_keys(stored):
    path = stored(incident("aaa111", AT, diagnosis=to_json(diagnosis())))
    listed = json.loads(run("list", "--json", "--store", path).output)
    assert listed["schema"] == "oomwatch.incidents/1"
    (row,) = listed["incidents"]
    assert row == {
        "id": "inc-aaa111",
        "state": "open",
        "severity": "critical",
        "headline": "A long prefill needed more activation memory than was left",
        "opened_at": AT,
        "opened_at_iso": "2025-11-29T07:06:40.000Z",
        "closed_at": None,
        "closed_at_iso": None,
        "acknowledged": None,
        "engine": "vllm-0",
        "host": "gpu-box",
        "cause": "prefill_activation_peak",
        "triggers": [
            {
                "kind": "log_failure",
                "at": AT,
                "gpu": None,
                "pid": None,
                "text": "it failed at aaa111",
            }
        ],
    }


# ------------------------------------------------------------------------------- show
def test_the_whole_report_of_one(stored):
    path = stored(
        incident("aaa111", AT, diagnosis=to_json(diagnosis())), incident("bbb222", AT + 60)
    )
    done = run("show", "aaa", "--store", path)
    assert done.exit_code == 0, done.output
    assert "log_failure: it failed at aaa111" in done.output
    assert "--max-num-batched-tokens" in done.output
    assert run("show", "--store", path).output == done.output  # the last that was diagnosed
    assert run("show", "inc-aaa111", "--store", path).output == done.output
    assert run("aaa", "--store", path).output == done.output  # an id alone shows it
    assert run("--store", path, "inc-aaa111").output == done.output
    assert "not diagnosed yet" in run("show", "bbb222", "--store", path).output
    whole = json.loads(run("show", "aaa111", "--format", "json", "--store", path).output)
    assert whole["schema"] == "oomwatch.incident/1"
    assert whole["diagnosis"]["schema"] == "oomwatch.diagnosis/1"
    assert run("show", "aaa111", "--format", "markdown", "--store", path).output.startswith("#")


def test_what_was_over_before_it_was_diagnosed_does_not_keep_one_waiting(stored):
    path = stored(incident("aaa111", AT, state="closed", closed_at=AT + 90))
    output = run("show", "aaa111", "--store", path).output
    assert "not diagnosed yet" not in output
    assert "it was over before more was known" in output


def test_it_says_with_what_it_was_over(stored):
    told = {**to_json(diagnosis()), "resolution": {"at": AT + 90, "command_changed": True}}
    closed = {"state": "closed", "closed_at": AT + 90}
    path = stored(incident("aaa111", AT, diagnosis=told, **closed))
    assert "It serves again, with other flags." in run("show", "--store", path).output


def test_what_happened_stands_in_order_of_time(stored):
    seen = (
        Trigger("oom_kill", AT + 30, "vllm-0", text="the kernel killed it"),
        Trigger("log_failure", AT, "vllm-0", text="it failed"),
        Trigger("restart", AT + 60, "vllm-0", text="it started again"),
    )
    output = run("show", "--store", stored(incident("aaa111", AT, triggers=seen))).output
    places = [output.index(f"{kind}: ") for kind in ("log_failure", "oom_kill", "restart")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        ("zzz", "no incident zzz"),
        ("a", "a fits 2 incidents"),
        ("", "fits 2 incidents"),
        (HOSTILE, "no incident"),
        ("%", "no incident %"),
    ],
)
def test_bad_ids(stored, identity, says):
    path = stored(incident("aaa111", AT), incident("aab222", AT + 60))
    done = run("show", "--store", path, "--", identity)
    assert isinstance(done.exception, NoInputError)
    assert says in str(done.exception)


@pytest.mark.parametrize("arguments", [["list"], ["show"], ["show", "aaa"], ["export"], []])
def test_no_store(tmp_path, arguments):
    done = run("--store", str(tmp_path / "none.db"), *arguments)
    assert isinstance(done.exception, NoInputError)
    assert "no store there" in str(done.exception)


def test_the_program_ends_with_status_3_and_one_line(tmp_path):
    path = str(tmp_path / "none\x1b[31m.db")
    done = subprocess.run(
        [sys.executable, "-m", "oomwatch", "incidents", "--store", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("oomwatch: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


def test_hostile_text_is_printed_without_its_control_characters(stored):
    trigger = Trigger("log_failure", AT, HOSTILE, text=HOSTILE)
    path = stored(incident("aaa111", AT, engine_id=HOSTILE, triggers=(trigger,)))
    for arguments in (["list"], ["show"], ["list", "--json"], ["show", "--format", "json"]):
        done = run(*arguments, "--store", path)
        assert done.exit_code == 0, done.exception
        text = json.dumps(json.loads(done.output)) if "json" in str(arguments) else done.output
        assert not [c for c in "\x1b\x07\u202e\x9b\r" if c in text or f"{ord(c):04x}" in text]


def test_what_the_agent_writes_can_be_listed(tmp_path):
    path = a_store(tmp_path, AT, log=started(AT - 3600) + refused(AT))
    assert "it failed" in run("--store", path).output


@pytest.mark.parametrize("name", ["list", "show", "export"])
def test_help_has_examples(name):
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"oomwatch incidents {name}" in done.output.partition("Examples:")[2]


def test_the_line_says_what_the_diagnosis_says(stored):
    told = incident("aaa111", AT, diagnosis=to_json(diagnosis()))
    path = stored(told, incident("bbb222", AT + 60))
    _, first, second = CliRunner().invoke(cli, ["incidents", "--store", path]).output.splitlines()
    assert "it failed at bbb222" in first
    assert second.endswith("prefill_activation_peak  a long prompt needed 2 GiB")


def test_a_line_is_cut_on_a_terminal_alone(stored):
    told = incident("aaa111", AT, diagnosis=to_json(diagnosis()))
    words = [sys.executable, "-m", "oomwatch", "incidents", "--store", stored(told)]
    master, terminal = os.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen:
        done = subprocess.run(
            words, stdout=terminal, check=True, env=os.environ | {"COLUMNS": "80"}
        )
        os.close(terminal)
        _, line = screen.read(10_000).decode().splitlines()
    assert done.returncode == 0
    assert len(line) <= 80
    assert line.endswith("…")
    piped = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True, env=piped)
    _, whole = done.stdout.splitlines()
    assert whole.startswith(line[:-1])
    assert whole.endswith("a long prompt needed 2 GiB")


def test_a_width_that_is_asked_for_holds_in_a_pipe_too(stored):
    path = stored(incident("aaa111", AT, diagnosis=to_json(diagnosis())))
    done = CliRunner().invoke(cli, ["incidents", "--store", path], env={"COLUMNS": "60"})
    assert max(map(len, done.output.splitlines())) == 60


def test_the_report_is_not_preceded_by_its_own_sentence(stored):
    said = diagnosis().incidents[0].finding.summary
    trigger = Trigger("log_failure", AT, "vllm-0", text=said)
    other = Trigger("process_exit", AT, "vllm-0", text="its core ended")
    told = to_json(diagnosis())
    path = stored(incident("aaa111", AT, diagnosis=told, triggers=(trigger, other)))
    output = run("show", "--store", path).output
    assert output.count(said) == 1
    assert "  process_exit: its core ended\n" in output


@pytest.mark.parametrize(
    ("word", "expected"), [("lst", "Did you mean 'list'?"), ("xyz", "There are list, show and")]
)
def test_what_is_neither_command_nor_id(word, expected):
    done = run(word)
    assert done.exit_code == 2
    assert expected in done.output


def test_the_report_of_an_incident_names_the_command_that_prints_its_flags(stored):
    told = diagnosis()
    (only,) = told.incidents
    steps = (*only.remedies, Remedy("up", "Upgrade", "other", "why", "none", action="Upgrade."))
    told = dataclasses.replace(told, incidents=(dataclasses.replace(only, remedies=steps),))
    path = stored(incident("aaa111", AT, diagnosis=to_json(told)))
    output = run("show", "--store", path).output
    assert "`oomwatch flags inc-aaa111` prints step 1." in " ".join(output.split())
    assert "--format args" not in output


def test_who_looks_after_an_incident_is_said(stored):
    path = stored(incident("aaa111", AT), incident("bbb222", AT + 60))
    acknowledged = CliRunner().invoke(
        cli, ["notify", "ack", "aaa111", "--by", "ann", "--store", path]
    )
    assert acknowledged.exit_code == 0, acknowledged.output
    _, newest, oldest = run("list", "--store", path).output.splitlines()
    assert "[acknowledged by ann]" in oldest
    assert "acknowledged" not in newest
    assert "acknowledged by ann" in run("show", "aaa111", "--store", path).output
    rows = json.loads(run("list", "--json", "--store", path).output)["incidents"]
    by = [row["acknowledged"] and row["acknowledged"]["by"] for row in rows]
    assert by == [None, "ann"]
    whole = json.loads(run("show", "aaa111", "--format", "json", "--store", path).output)
    assert whole["acknowledged"] == rows[1]["acknowledged"]
