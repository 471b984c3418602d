"""`oomwatch db`, on real files and a real server."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import time

import pytest
from click.testing import CliRunner
from fresh_store import CLOCK, Store
from test_store_outbox import ROW, SILENCE
from test_store_round_trip import ENGINE, GPU, HOLDER, HOST, INCIDENT, KILL, LINE, PROCESS

from oomwatch.cli.db import command
from oomwatch.cli.notify import command as notify
from oomwatch.cli.silence import command as silence
from oomwatch.errors import NoInputError, OomwatchError, UsageError
from oomwatch.sources.recording import read_recording
from oomwatch.store.export import KINDS
from oomwatch.store.lanes import PendingEvent
from oomwatch.store.outbox import read_outbox, save_outbox
from oomwatch.store.rollup import roll_up
from oomwatch.store.silences import read_silences, save_silence

SAMPLES = {"gpu": GPU, "gpu_process": HOLDER, "process": PROCESS, "host": HOST, "engine": ENGINE}


@pytest.fixture
def filled(store: Store) -> Store:
    store.write(
        *SAMPLES.values(),
        events=[PendingEvent(LINE, "vllm-8000", CLOCK, 0), PendingEvent(KILL, None, CLOCK, 0)],
        incidents=[INCIDENT],
    )
    with store.writer.begin():
        save_outbox(store.writer, store.recorder.names.host_id(store.writer), [ROW])
        save_silence(store.writer, SILENCE)
    return store


def run(*arguments: str) -> str:
    done = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_stats_count_every_table(filled):
    found = json.loads(run("stats", "--store", filled.text, "--json"))
    rows = {table["name"]: table["rows"] for table in found["tables"]}
    assert rows["gpu_sample"] == rows["engine"] == rows["incident"] == 1
    assert rows["log_event"] == 2
    assert found["schema"] == "oomwatch.db/1"
    assert found["open_incidents"] == ["inc-1"]
    assert found["engines"][0]["engine"] == "vllm-8000"
    sqlite = filled.url.get_backend_name() == "sqlite"
    assert (found["file_bytes"] is not None) == sqlite
    text = run("stats", "--store", filled.text)
    assert "gpu_sample" in text
    assert "open incidents: inc-1" in text
    assert ("GiB" in text or "KiB" in text) == sqlite


def test_check_tells_a_sound_file_from_a_damaged_one(filled):
    assert run("check", "--store", filled.text).endswith(": sound\n")
    if filled.url.get_backend_name() != "sqlite":
        return
    filled.writer.close()
    with open(filled.text, "r+b") as file:  # noqa: PTH123 - a text
        file.seek(4096)
        file.write(b"\xff" * 40_000)
    done = CliRunner().invoke(command, ["check", "--store", filled.text, "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["problems"]


def test_silences_and_retries_are_written_into_either_store(filled):
    done = CliRunner().invoke(
        silence, ["add", "--all", "--for", "1h", "--store", filled.text], catch_exceptions=False
    )
    assert "all incidents" in done.stdout
    done = CliRunner().invoke(
        notify, ["retry", "--all", "--json", "--store", filled.text], catch_exceptions=False
    )
    assert json.loads(done.stdout)["messages"] == 1
    with filled.read() as connection:
        assert len(read_silences(connection)) == 2
        assert [row.state for row in read_outbox(connection)] == ["retry"]


def test_export_is_a_recording_in_lines(filled, tmp_path):
    lines = [json.loads(line) for line in run("export", "--store", filled.text).splitlines()]
    assert [line["record"] for line in lines] == [
        *SAMPLES,
        *("event", "event", "incident", "message", "silence"),
    ]
    # The same lines, a file for each kind, are read by the reader of recordings.
    recording = tmp_path / "recording"
    recording.mkdir()
    manifest = {
        "schema": "oomwatch.recording/1",
        "gpus": [{"index": 3, "total_bytes": GPU.total_bytes}],
    }
    (recording / "manifest.json").write_text(json.dumps(manifest))
    for kind in SAMPLES:
        kept = [
            {key: value for key, value in line.items() if key != "record"}
            for line in lines
            if line["record"] == kind
        ]
        (recording / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    series = read_recording(str(recording)).series
    assert series.hosts == (HOST,)
    assert series.engines == (ENGINE,)
    assert series.gpus[0].used_bytes == GPU.used_bytes
    assert series.gpu_processes[0].used_bytes == HOLDER.used_bytes


def test_export_takes_a_window_a_kind_and_a_host(filled):
    line = ["export", "--store", filled.text, "--kind", "host"]
    assert run(*line, "--since", "2020-01-01T00:00Z", "--until", "2020-01-02T00:00Z") == ""
    assert len(run(*line, "--since", "2025-01-01T00:00Z").splitlines()) == 1
    assert len(run(*line, "--host", "host-a").splitlines()) == 1
    assert run(*line, "--host", "host-b") == ""


def test_every_sample_is_exported_once_over_a_long_time(sqlite_store):
    start = HOST.at
    moments = [start + n * 450 for n in range(20)] + [start + 40 * 86400]
    sqlite_store.write(*(type(HOST)(at, 1) for at in moments))
    lines = run("export", "--store", sqlite_store.text, "--kind", "host").splitlines()
    assert [json.loads(line)["t"] for line in lines] == moments


def test_export_of_a_tier(sqlite_store):
    sqlite_store.write(*(type(HOST)(HOST.at + n, mem_available_bytes=n) for n in range(120)))
    sum(roll_up(sqlite_store.writer, sqlite_store.host_id(), round((HOST.at + 200) * 1000)))
    line = ["export", "--store", sqlite_store.text, "--kind", "host", "--step", "60"]
    found = [json.loads(row)["mem_available_bytes"] for row in run(*line).splitlines()]
    assert found == [59, 119] or found[0] == 19  # buckets begin on whole minutes


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_the_same_columns_whatever_is_known(filled, kind, tmp_path):
    path = tmp_path / "out.csv"
    run("export", "--store", filled.text, "--format", "csv", "--kind", kind, "-o", str(path))
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert len(rows) == (2 if kind == "event" else 1)
    assert rows[0]["t"]
    assert "\x1b" not in path.read_text()


def test_a_copy_is_a_store_of_its_own(sqlite_store, tmp_path):
    sqlite_store.write(HOST)
    copy = tmp_path / "copy.db"
    run("export", "--store", sqlite_store.text, "--format", "sqlite", "-o", str(copy))
    assert run("check", "--store", str(copy)).endswith(": sound\n")
    assert len(run("export", "--store", str(copy)).splitlines()) == 1


def test_prune_says_first_and_deletes_then(store):
    now = time.time()
    store.write(*(type(HOST)(now - n * 3600 + 600, n) for n in range(1, 11)))
    sum(roll_up(store.writer, store.host_id(), round(now * 1000)))
    line = ["prune", "--store", store.text, "--raw", "5h", "--json"]
    said = json.loads(run(*line, "--dry-run"))
    assert store.count("host_sample") == 10
    done = json.loads(run(*line))
    assert said["rows"] == done["rows"]
    assert 5 <= store.count("host_sample") <= 6
    assert store.count("host_sample") == 10 - done["rows"]
    assert "0 rows deleted" in run("prune", "--store", store.text, "--raw", "5h")


def test_prune_by_size_gives_space_back(sqlite_store):
    start = time.time() - 20 * 3600
    for hour in range(9):
        sqlite_store.write(
            *(
                type(GPU)(start + hour * 3600 + n, gpu, used_bytes=2**36 + n, free_bytes=n + 2**33)
                for n in range(3600)
                for gpu in range(8)
            )
        )
    found = json.loads(run("prune", "--store", sqlite_store.text, "--max-size", "16MiB", "--json"))
    assert found["file_bytes_after"] < 8 * 1024**2 < found["file_bytes_before"]
    assert 0 < found["rows"] < 259_200


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["stats", "--store", "mysql://x"], "not known"),
        (["export", "--format", "csv"], "one kind"),
        (["export", "--format", "sqlite"], "add -o"),
        (["export", "--since", "yesterday"], "no time"),
        (["prune", "--raw", "12"], "no time"),
        (["prune", "--max-size", "500"], "no size"),
        (["export", "-o", "/dev/null/x"], "cannot be written"),
    ],
)
def test_wrong_use_is_one_line(sqlite_store, arguments, error):
    sqlite_store.write(HOST)
    given = arguments if "--store" in arguments else [*arguments, "--store", sqlite_store.text]
    with pytest.raises(OomwatchError, match=error) as caught:
        CliRunner().invoke(command, given, catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, (UsageError, OomwatchError))


@pytest.mark.parametrize("name", ["stats", "check", "prune", "export"])
def test_a_store_that_is_not_there_is_no_input(tmp_path, name):
    with pytest.raises(NoInputError):
        CliRunner().invoke(
            command, [name, "--store", str(tmp_path / "none.db")], catch_exceptions=False
        )
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_database_is_refused(tmp_path):
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(OomwatchError, match="another program"):
        CliRunner().invoke(command, ["stats", "--store", str(path)], catch_exceptions=False)


def test_the_store_of_the_configuration_is_the_default(sqlite_store, tmp_path, monkeypatch):
    sqlite_store.write(HOST)
    config = tmp_path / "config.toml"
    config.write_text(f'[store]\npath = "{sqlite_store.text}"\n')
    monkeypatch.setenv("OOMWATCH_CONFIG", str(config))
    assert run("check") == f"{sqlite_store.text}: sound\n"
