"""Stored incidents: judged anew from the store, and handed on as recordings."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from stored_incidents import PROMPT, SECRET, a_store, killed, refused, saturated, started

from oomwatch.cli import cli
from oomwatch.records import EngineExit
from oomwatch.sources.recording import read_recording

AT = float(int(time.time()) - 7200)


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, words, catch_exceptions=False, env={"TZ": "UTC"})
    return done.exit_code, done.stdout, done.stderr


def diagnosed(*words: str) -> dict[str, object]:
    status, out, err = run("diagnose", *words, "--json")
    assert status in {0, 1}, err
    return json.loads(out)


def first_cause(report: dict) -> str:
    found = report["incidents"] or report["risks"]
    return found[0]["cause"] if found else report["verdict"]


KILL = EngineExit(
    "vllm-0", "process 42 (VLLM::EngineCore)", AT, 137, 9, oom_killed=True, detail=None
)
CASES = {
    "prefill_activation_peak": {"log": started(AT - 3600) + refused(AT)},
    "kv_saturation": {"log": started(AT - 3600), "samples": saturated(AT)},
    "host_oom_kill": {
        "log": started(AT - 3600),
        "kernel": killed(AT),
        "exits": (KILL,),
        "ended": True,
    },
}


@pytest.mark.parametrize("cause", CASES)
def test_an_incident_is_judged_anew_and_its_export_says_the_same(tmp_path, cause):
    store = a_store(tmp_path, AT, **CASES[cause])
    stored = diagnosed("--incident", "abc123", "--store", store)
    assert first_cause(stored) == cause
    assert stored["host"] == "gpu-box"
    assert stored["engines"][0]["arguments"]["--max-model-len"] == "8192"
    path = tmp_path / "out.tar.gz"
    status, out, err = run("incidents", "export", "abc123", "--store", store, "-o", str(path))
    assert status == 0, err
    assert f"diagnose --recording {path}" in out
    exported = diagnosed("--recording", str(path))
    assert first_cause(exported) == cause
    assert exported["verdict"] == stored["verdict"]
    assert [e["version"] for e in exported["engines"]] == ["0.11.0"]


def test_what_was_only_forecast_is_still_told_by_its_cause(tmp_path):
    store = a_store(tmp_path, AT, log=started(AT - 3600), kind="forecast_kv")
    report = diagnosed("--incident", "abc123", "--store", store)
    assert (report["verdict"], first_cause(report)) == ("at_risk", "kv_saturation")
    assert report["risks"][0]["summary"].startswith("it failed. ")


def everything(root: Path) -> str:
    return "\n".join(
        f"{path.name}\n{path.read_text()}" for path in sorted(root.rglob("*")) if path.is_file()
    )


def test_an_export_holds_the_window_and_nobodys_secrets(tmp_path):
    store = a_store(tmp_path, AT, log=started(AT - 3600) + refused(AT), samples=saturated(AT))
    folder = tmp_path / "out"
    assert run("incidents", "export", "--store", store, "-o", str(folder))[0] == 0
    text = everything(folder)
    for secret in (SECRET, PROMPT, "rosalind"):
        assert secret not in text
    recording = read_recording(str(folder))
    assert recording.redacted is True
    assert recording.incident == "inc-abc123"
    assert re.fullmatch(r"/home/user\d/models/m", recording.engines[0].command[2])
    assert (recording.started_at, recording.ended_at) == (AT - 600, AT + 60)
    seconds = [sample.at - AT for sample in recording.series.gpus]
    assert seconds == [float(second) for second in range(-600, 60)]
    assert len(recording.series.engines) == 660


def test_without_redaction_names_stay_and_secrets_do_not(tmp_path):
    store = a_store(tmp_path, AT, log=started(AT - 3600) + refused(AT))
    folder = tmp_path / "out"
    words = ("incidents", "export", "--no-redact", "--store", store, "-o", str(folder))
    assert run(*words)[0] == 0
    text = everything(folder)
    assert "rosalind" in text
    assert SECRET not in text
    assert read_recording(str(folder)).redacted is False


def test_what_is_there_is_left_alone(tmp_path):
    store = a_store(tmp_path, AT, log=refused(AT))
    (tmp_path / "out").mkdir()
    done = CliRunner().invoke(
        cli, ["incidents", "export", "--store", store, "-o", str(tmp_path / "out")]
    )
    assert "exists already" in str(done.exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_any_window_of_the_history_is_diagnosed(tmp_path):
    store = a_store(tmp_path, AT, log=started(AT - 3600), samples=saturated(AT))
    begin, end = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(AT + s)) for s in (-300, 50))
    report = diagnosed("--store", store, "--since", begin, "--until", end)
    assert first_cause(report) == "kv_saturation"
    assert [engine["id"] for engine in report["engines"]] == ["vllm-0"]
    assert report["gpus"][0]["name"] == "NVIDIA A10"


def test_a_window_without_anything_is_said(tmp_path):
    store = a_store(tmp_path, AT, log=refused(AT))
    done = CliRunner().invoke(
        cli, ["diagnose", "--store", store, "--since", "2h", "--until", "110min"]
    )
    assert done.exit_code == 0 or "holds nothing" in str(done.exception)
    done = CliRunner().invoke(cli, ["diagnose", "--store", store, "--since", "5min"])
    assert "the store holds nothing of that time" in str(done.exception)
    done = CliRunner().invoke(cli, ["diagnose", "--incident", "zzz", "--store", store])
    assert "no incident zzz" in str(done.exception)
