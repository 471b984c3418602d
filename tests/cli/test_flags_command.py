"""`oomwatch flags`: nothing but what can be pasted."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner
from test_incidents_command import AT, HOSTILE, diagnosis, incident, stored

from oomwatch.cli import cli
from oomwatch.errors import NoInputError
from oomwatch.records import Finding, Incident
from oomwatch.report.json_report import to_json

__all__ = ["stored"]


def run(*arguments: str):
    return CliRunner().invoke(cli, ["flags", *arguments])


def test_the_flags_of_the_last_incident(stored):
    path = stored(
        incident("aaa111", AT, diagnosis=to_json(diagnosis())), incident("bbb222", AT + 60)
    )
    assert run("--store", path).output == "--max-num-batched-tokens 2048\n"
    assert run("aaa", "--store", path).output == "--max-num-batched-tokens 2048\n"


@pytest.mark.parametrize("form", ["compose", "k8s", "python"])
def test_other_forms(stored, form):
    path = stored(incident("aaa111", AT, diagnosis=to_json(diagnosis())))
    done = run("--format", form, "--store", path)
    assert done.exit_code == 0
    assert "2048" in done.output


def without_remedies():
    told = diagnosis()
    (only,) = told.incidents
    return dataclasses.replace(told, incidents=(dataclasses.replace(only, remedies=()),))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (None, "inc-aaa111 has no diagnosis yet"),
        (to_json(dataclasses.replace(diagnosis(), incidents=())), "has no cause"),
        (to_json(without_remedies()), "no flag helps against prefill_activation_peak"),
        ({"incidents": [{"cause": HOSTILE}]}, "no flag helps against"),
    ],
)
def test_where_there_are_none_nothing_is_printed(stored, told, says):
    path = stored(incident("aaa111", AT, diagnosis=told))
    done = run("--store", path)
    assert done.stdout == ""
    assert isinstance(done.exception, NoInputError)
    assert says in str(done.exception)


def test_an_empty_or_missing_store(stored, tmp_path):
    assert "holds no incident" in str(run("--store", stored()).exception)
    done = run("--store", str(tmp_path / "none.db"))
    assert isinstance(done.exception, NoInputError)


def test_help_has_examples():
    assert "oomwatch flags" in run("--help").output.partition("Examples:")[2]


def test_the_command_of_a_watched_engine_is_not_repeated(stored):
    told = diagnosis()
    (engine,) = told.engines
    command = ("vllm", "serve", "m", "--port", "80")
    told = dataclasses.replace(told, engines=(dataclasses.replace(engine, command=command),))
    path = stored(incident("aaa111", AT, diagnosis=to_json(told)))
    assert run("--store", path).output == "--max-num-batched-tokens 2048\n"


def test_a_form_without_anything_says_why(stored):
    path = stored(incident("aaa111", AT, diagnosis=to_json(diagnosis())))
    done = run("--format", "env", "--store", path)
    assert done.stdout == ""
    assert isinstance(done.exception, NoInputError)
    assert "no remedy here is an environment variable" in str(done.exception)


def test_the_memory_incident_counts_behind_a_failure_that_no_flag_mends(stored):
    told = diagnosis()
    (memory,) = told.incidents
    port = Finding("not_oom", "port_in_use", 0.9, "taken", at=AT + 60)
    told = dataclasses.replace(told, incidents=(Incident("i-2", port), memory))
    path = stored(incident("aaa111", AT, diagnosis=to_json(told)))
    assert run("--store", path).output == "--max-num-batched-tokens 2048\n"
