"""Recordings: directories and archives, whole, partial, damaged and hostile."""

import gzip
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.errors import SourceError, SourceUnavailable
from oomwatch.records import EngineSample, GpuSample
from oomwatch.sources.recording import read_recording
from oomwatch.sources.recording_archive import unpack_recording
from oomwatch.sources.recording_samples import (
    MAX_LINE_BYTES,
    Thinner,
    engine_kind,
    gpu_kind,
    process_kind,
    read_samples,
)

FIXTURE = Path(__file__).parent.parent / "fixtures" / "recordings" / "long_prompt"
T0 = 1_760_000_000.0


# ---------------------------------------------------------------- a whole directory
def test_manifest_and_files():
    recording = read_recording(str(FIXTURE))
    (engine,) = recording.engines
    assert recording.host == "gpu-box"
    assert (recording.started_at, recording.ended_at) == (T0, T0 + 30)
    assert recording.redacted is True
    assert (engine.id, engine.engine, engine.version) == ("vllm-0", "vllm", "0.11.0")
    assert engine.command == ("vllm", "serve", "/models/chat", "--max-model-len", "65536")
    assert engine.pids == (500, 560)
    assert [gpu.total_bytes for gpu in recording.gpus] == [48305799168, None]
    assert recording.logs == {"vllm-0": str(FIXTURE / "logs" / "server.log")}
    assert recording.kernel_log == str(FIXTURE / "kernel.log")
    assert [(page.at, page.engine) for page in recording.pages] == [
        (T0 + 0.25, "vllm-0"),
        (T0 + 9, "vllm-0"),
    ]
    assert recording.problems == ()


def test_samples_are_in_order_of_time_and_absent_is_none():
    series = read_recording(str(FIXTURE)).series
    card = [sample for sample in series.gpus if sample.gpu == 0]
    assert [sample.at for sample in card] == [T0, T0 + 10]
    assert card[0].total_bytes == 48305799168
    assert card[0].temperature_celsius is None
    assert card[1].power_watts == 301.5
    assert series.gpu_processes[1].used_bytes is None
    assert series.processes[0].cmdline == ("python", "-c", "spawn")
    assert series.processes[0].unit == "vllm.service"
    assert series.processes[1].cmdline is None
    assert series.hosts[0].cgroup_oom_kills == 0


def test_unified_memory_board_has_no_total_and_others_add_up():
    series = read_recording(str(FIXTURE)).series
    totals = {sample.gpu: sample.total_bytes for sample in series.gpus}
    assert totals[1] is None
    assert totals[2] == 33  # not in the manifest: reserved + used + free


def test_unknown_numbers_of_the_engine_are_kept():
    first, second = read_recording(str(FIXTURE)).series.engines
    assert first.extra == {"num_grammar_total": 4}
    assert first.kv_usage_ratio == 0.12
    assert second.engine == "vllm-0"  # the only engine there is
    assert second.kv_usage_ratio is None


# ---------------------------------------------------------------- partial and damaged
def make(tmp_path, manifest=None, **files):
    """A recording with the given texts; `gpu` is gpu.jsonl and so on."""
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    return str(tmp_path)


def test_bad_lines_are_counted_and_skipped(tmp_path):
    path = make(
        tmp_path,
        {"gpus": [{"index": 0, "total_bytes": 100}]},
        gpu=b"\n".join(
            [
                b'{"t": 1, "gpu": 0, "used_bytes": 5}',
                b'{"t": 2, "gpu": 0, "used_byt',
                b"\xff\xfe\x00garbage",
                b"[1, 2]",
                b'{"gpu": 0, "used_bytes": 5}',
                b'{"t": "3", "gpu": 0}',
                b'{"t": NaN, "gpu": 0}',
                b'{"t": 1e308, "gpu": 0}',
                b'{"t": -1, "gpu": 0}',
                b"[" * 100_000,
                b'{"t": ' + b"9" * 5000 + b"}",
                b"",
                b'{"t": 4, "used_bytes": -5, "free_bytes": 1e400, "utilization_ratio": true}',
            ]
        ),
    )
    recording = read_recording(path)
    assert [sample.at for sample in recording.series.gpus] == [1, 4]
    last = recording.series.gpus[1]
    assert (last.gpu, last.used_bytes, last.free_bytes, last.utilization_ratio) == (
        0,
        None,
        None,
        None,
    )
    assert recording.problems == ("gpu.jsonl: 10 unreadable lines were skipped",)


def test_a_line_longer_than_any_sample_is_skipped_and_the_next_is_read(tmp_path):
    huge = b'{"t": 1, "x": "' + b"a" * (3 * MAX_LINE_BYTES) + b'"}\n'
    path = make(tmp_path, host=huge + b'{"t": 2, "mem_total_bytes": 7}\n')
    recording = read_recording(path)
    assert [sample.mem_total_bytes for sample in recording.series.hosts] == [7]
    assert "host.jsonl: 1 unreadable lines were skipped" in recording.problems


def test_without_manifest_the_samples_still_count(tmp_path):
    recording = read_recording(make(tmp_path, gpu=b'{"t": 1, "gpu": 3, "used_bytes": 5}\n'))
    assert recording.engines == ()
    assert recording.series.gpus[0].gpu == 3
    assert any("manifest.json: absent" in problem for problem in recording.problems)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 50_000])
def test_a_broken_manifest_is_a_problem_not_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    recording = read_recording(str(tmp_path))
    assert recording.gpus == ()
    assert any("not a JSON object" in problem for problem in recording.problems)


def test_manifest_values_of_wrong_types_are_unknown(tmp_path):
    manifest = {
        "schema": "oomwatch.recording/9",
        "host": 7,
        "started_at": "yesterday",
        "ended_at": 1e300,
        "engines": [{"engine": "sglang", "command": "text", "env": [], "pids": ["x", 5]}, "no"],
        "gpus": {"index": 0},
        "redacted": "yes",
    }
    recording = read_recording(make(tmp_path, manifest))
    (engine,) = recording.engines
    assert engine.id == "sglang-0"
    assert (engine.command, engine.env, engine.pids) == (None, {}, (5,))
    assert (recording.host, recording.started_at, recording.redacted) == (None, None, None)
    assert recording.ended_at is None
    assert any("oomwatch.recording/9" in problem for problem in recording.problems)


@pytest.mark.parametrize("log", ["../secret", "/etc/hostname", "logs/link", "a\0b", "logs/none"])
def test_a_log_outside_the_recording_is_not_read(tmp_path, log):
    inside = tmp_path / "recording"
    (inside / "logs").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (inside / "logs" / "link").symlink_to(tmp_path / "secret")
    (inside / "manifest.json").write_text(json.dumps({"engines": [{"id": "e", "log": log}]}))
    recording = read_recording(str(inside))
    assert recording.logs == {}
    assert any(problem.startswith("log of 'e':") for problem in recording.problems)


def test_a_log_that_the_manifest_does_not_name_goes_to_the_only_engine(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.log").write_text("hello")
    make(tmp_path, {"engines": [{"id": "e"}]})
    assert read_recording(str(tmp_path)).logs == {"e": str(tmp_path / "logs" / "out.log")}


def test_logs_of_no_engine_keep_their_name(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("a.log", "b.log"):
        (tmp_path / "logs" / name).write_text("hello")
    make(tmp_path, {"engines": [{"id": "e"}]})
    assert set(read_recording(str(tmp_path)).logs) == {"a.log", "b.log"}


def test_a_named_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "gpu.jsonl")
    make(tmp_path, {"host": "h"})
    assert read_recording(str(tmp_path)).series.gpus == ()


def test_not_a_recording(tmp_path):
    with pytest.raises(SourceUnavailable, match="no such file"):
        read_recording(str(tmp_path / "none"))
    with pytest.raises(SourceError, match="not a recording"):
        read_recording(str(tmp_path))
    (tmp_path / "file.tar.gz").write_bytes(b"not a tar at all" * 100)
    with pytest.raises(SourceError, match="not a recording"):
        read_recording(str(tmp_path / "file.tar.gz"))


# ---------------------------------------------------------------- archives
def tar_bytes(*, top=""):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(FIXTURE, arcname=top or ".")
    return buffer.getvalue()


def compress(data, suffix):
    if suffix == ".tar.gz":
        return gzip.compress(data)
    if suffix == ".tar.zst":
        return zstandard.compress(data)
    if suffix == ".tar.xz":
        return lzma.compress(data)
    return data


@pytest.mark.parametrize("top", ["", "incident-7"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.zst", ".tar.xz"])
def test_archives_read_like_the_directory(tmp_path, suffix, top):
    path = tmp_path / f"incident{suffix}"
    path.write_bytes(compress(tar_bytes(top=top), suffix))
    recording = read_recording(str(path))
    assert recording.series == read_recording(str(FIXTURE)).series
    assert Path(recording.logs["vllm-0"]).read_text().startswith("INFO")
    assert recording.cite(recording.logs["vllm-0"]) == f"{path}:logs/server.log"
    assert recording.problems == ()


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.zst", ".tar.xz"])
def test_a_truncated_archive_gives_what_is_left(tmp_path, suffix):
    # A large log at the end, so that the cut falls into it.
    source = tmp_path / "recording"
    shutil.copytree(FIXTURE, source)
    (source / "logs" / "server.log").unlink()
    noise = "".join(str(number * 7919) for number in range(200_000))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(source, arcname=".")
        (source / "logs" / "server.log").write_text(noise)
        archive.add(source / "logs" / "server.log", arcname="./logs/server.log")
    packed = compress(buffer.getvalue(), suffix)
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    recording = read_recording(str(path))
    assert recording.host == "gpu-box"
    assert any("cut short" in problem for problem in recording.problems)


def test_an_archive_cannot_write_outside_or_plant_links(tmp_path):
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        for name in (
            "/tmp/oomwatch-evil/manifest.json",
            "../manifest.json",
            "a/../../manifest.json",
            "logs/../../x",
            "logs/..",
            "etc/passwd",
            "logs/sub/deep.log",
            "logs/" + "a" * 300,
        ):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        for kind, target in (
            (tarfile.SYMTYPE, "/etc/hostname"),
            (tarfile.LNKTYPE, "/etc/hostname"),
        ):
            link = tarfile.TarInfo("logs/server.log")
            link.type, link.linkname = kind, target
            archive.addfile(link)
        fifo = tarfile.TarInfo("gpu.jsonl")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
        good = tarfile.TarInfo("manifest.json")
        good.size = 2
        archive.addfile(good, io.BytesIO(b"{}"))
    recording = read_recording(str(path))
    files = [entry for entry in Path(recording.root).rglob("*") if not entry.is_dir()]
    assert [entry.name for entry in files] == ["manifest.json"]
    assert files[0].read_bytes() == b"{}"
    assert not Path("/tmp/oomwatch-evil").exists()


def test_unpacking_stops_at_the_limit(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("logs/server.log")
        member.size = 5_000_000
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    path.write_bytes(buffer.getvalue())
    problems: list[str] = []
    directory = unpack_recording(path, problems, max_bytes=1_000_000)
    assert sum(file.stat().st_size for file in directory.rglob("*.log")) == 1_000_000
    assert problems == ["the archive is larger than the limit; the rest was not read"]


def test_unpacked_files_are_removed_at_exit(tmp_path):
    path = tmp_path / "incident.tar"
    path.write_bytes(tar_bytes())
    code = (
        "import sys; from oomwatch.sources.recording import read_recording\n"
        "print(read_recording(sys.argv[1]).root)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    root = Path(done.stdout.strip())
    assert root.name.startswith("oomwatch-recording-")
    assert not root.exists()


def test_unpacked_files_are_removed_when_it_is_told_to_end(tmp_path):
    path = tmp_path / "incident.tar"
    path.write_bytes(tar_bytes())
    code = (
        "import sys, time; from oomwatch.sources.recording import read_recording\n"
        "print(read_recording(sys.argv[1]).root, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        root = Path(reader.stdout.readline().strip())
        assert root.is_dir()
        reader.terminate()
        assert reader.wait(30) == 128 + signal.SIGTERM
    assert not root.exists()


# ---------------------------------------------------------------- thinning
USED = st.one_of(st.none(), st.integers(0, 10**12))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), USED, USED), min_size=1, max_size=600),
    limit=st.integers(100, 200),
)
def test_thinning_keeps_extremes_and_the_last_sample(rows, limit):
    thinner = Thinner(gpu_kind({}, None), limit)
    samples = [
        GpuSample(at=float(at), gpu=gpu, used_bytes=used, free_bytes=free)
        for at, (gpu, used, free) in enumerate(rows)
    ]
    for sample in samples:
        thinner.add(sample)
    kept = thinner.samples()
    assert len(kept) <= limit
    assert [sample.at for sample in kept] == sorted(sample.at for sample in kept)
    assert set(kept) <= set(samples)
    for gpu in {sample.gpu for sample in samples}:
        before = [sample for sample in samples if sample.gpu == gpu]
        after = [sample for sample in kept if sample.gpu == gpu]
        assert after[0] == before[0]
        assert after[-1] == before[-1]
        for field in ("used_bytes", "free_bytes"):
            was = [value for one in before if (value := getattr(one, field)) is not None]
            now = [value for one in after if (value := getattr(one, field)) is not None]
            assert (min(was, default=0), max(was, default=0)) == (
                min(now, default=0),
                max(now, default=0),
            )


def test_few_samples_are_not_thinned():
    thinner = Thinner(engine_kind(None), 1000)
    for at in range(1000):
        thinner.add(EngineSample(at=float(at), engine="e", running=1.0))
    assert len(thinner.samples()) == 1000
    assert not thinner.thinned


def test_with_too_many_things_the_largest_stay(tmp_path):
    rows = [{"t": pid, "pid": pid, "rss_bytes": pid * 1000} for pid in range(1, 501)]
    (tmp_path / "process.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems: list[str] = []
    kept = read_samples(tmp_path, process_kind(), problems, limit=100)
    assert len(kept) <= 100
    assert kept[-1].pid == 500
    assert "smallest" in problems[0]


def test_a_long_series_is_read_in_bounded_memory(tmp_path):
    with (tmp_path / "gpu.jsonl").open("w") as file:
        for at in range(20_000):
            file.write(json.dumps({"t": at, "gpu": 0, "used_bytes": 10**9 + (at == 12_345)}) + "\n")
    problems: list[str] = []
    kept = read_samples(tmp_path, gpu_kind({}, None), problems, limit=2_000)
    assert len(kept) <= 2_000
    assert max(sample.used_bytes for sample in kept) == 10**9 + 1
    assert kept[-1].at == 19_999
    assert problems == ["gpu.jsonl: thinned, peaks and last values are kept"]


# ---------------------------------------------------------------- anything at all
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "engine", "engines", "gpus", "gpu", "index", "t", "pid", "log", "used_bytes"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(manifest=JSON, rows=st.lists(JSON | st.binary(max_size=40), max_size=6))
def test_no_content_raises(tmp_path_factory, manifest, rows):
    root = tmp_path_factory.mktemp("any")
    (root / "manifest.json").write_text(json.dumps(manifest))
    body = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    for name in ("gpu", "gpu_process", "process", "host", "engine"):
        (root / f"{name}.jsonl").write_bytes(body)
    recording = read_recording(str(root))
    for samples in (recording.series.gpus, recording.series.engines, recording.series.processes):
        assert all(isinstance(sample.at, int | float) for sample in samples)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=2000), magic=st.sampled_from([b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"])
)
def test_no_archive_raises_anything_else(tmp_path_factory, data, magic):
    path = tmp_path_factory.mktemp("any") / "x.tar"
    path.write_bytes(magic + data)
    with pytest.raises(SourceError):
        read_recording(str(path))
