"""Reads a recording: a directory (or the same as a tar file) of what was seen around an incident.

``manifest.json`` says what was watched; ``gpu.jsonl``, ``gpu_process.jsonl``, ``process.jsonl``,
``host.jsonl`` and ``engine.jsonl`` hold samples; ``logs/``, ``metrics/`` and ``kernel.log`` hold
raw text for the readers of those. Every file and every key may be absent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomwatch.errors import PermissionDeniedError, SourceError, SourceUnavailable
from oomwatch.records import EngineExit, Gpu, RecordedEngine, Series
from oomwatch.sources.recording_archive import unpack_recording
from oomwatch.sources.recording_samples import (
    count,
    engine_kind,
    gpu_kind,
    gpu_process_kind,
    host_kind,
    moment,
    process_kind,
    read_samples,
    text,
)

SCHEMA: Final = "oomwatch.recording/1"
MAX_MANIFEST_BYTES: Final = 16 * 1024**2

# metrics/1760000000.25.vllm-0.prom
_PAGE_NAME: Final = re.compile(r"(\d{1,11}(?:\.\d{1,9})?)\.(.+)\.prom")
_PARTS: Final = frozenset(
    {
        "manifest.json",
        "gpu.jsonl",
        "gpu_process.jsonl",
        "process.jsonl",
        "host.jsonl",
        "engine.jsonl",
        "kernel.log",
        "logs",
        "metrics",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedPage:
    """One raw scrape of an engine's metrics, still a file."""

    at: float
    engine: str
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """Everything a recording holds; texts are left as files for their own readers."""

    path: str
    root: str
    """Where the files are: `path` itself, or where an archive was unpacked to."""
    schema: str | None
    host: str | None
    started_at: float | None
    ended_at: float | None
    redacted: bool | None
    engines: tuple[RecordedEngine, ...]
    gpus: tuple[Gpu, ...]
    series: Series
    logs: Mapping[str, str]
    """Engine id to the path of its log; logs of no known engine by their own name."""
    kernel_log: str | None
    pages: tuple[RecordedPage, ...]
    problems: tuple[str, ...]
    exits: tuple[EngineExit, ...] = ()
    incident: str | None = None
    """The id of the incident whose window it is."""

    def cite(self, path: str) -> str:
        """How a report names one of the files: archives are cited, not where they were unpacked."""
        if self.root == self.path or not path.startswith(self.root + os.sep):
            return path
        return f"{self.path}:{path[len(self.root) + 1 :]}"


def read_recording(path: str) -> Recording:
    """Read a recording; bad parts are left out and named in `problems`.

    Raises:
        SourceUnavailable: there is no such file.
        PermissionDeniedError: it may not be read.
        SourceError: it is not a recording.

    """
    problems: list[str] = []
    try:
        root = Path(path)
        if not root.is_dir():
            root = unpack_recording(root, problems)
        names = {entry.name for entry in root.iterdir()}
    except FileNotFoundError:
        raise SourceUnavailable(f"{path}: no such file or directory") from None
    except PermissionError:
        raise PermissionDeniedError(f"{path}: may not be read by this user") from None
    except OSError as error:
        raise SourceUnavailable(f"{path}: {error.strerror or error}") from None
    if not names & _PARTS:
        raise SourceError(f"{path}: not a recording: no manifest.json or sample files inside")

    manifest = _read_manifest(root, problems)
    engines = tuple(_engines(manifest))
    gpus = tuple(_gpus(manifest))
    return Recording(
        path=str(Path(path)),
        root=str(root),
        schema=text(manifest.get("schema")),
        host=text(manifest.get("host")),
        started_at=moment(manifest.get("started_at")),
        ended_at=moment(manifest.get("ended_at")),
        redacted=redacted if isinstance(redacted := manifest.get("redacted"), bool) else None,
        engines=engines,
        gpus=gpus,
        series=_read_series(root, engines, gpus, problems),
        logs=_find_logs(root, engines, problems),
        kernel_log=str(kernel_log) if (kernel_log := _file_in(root, "kernel.log")) else None,
        pages=tuple(_find_pages(root)),
        problems=tuple(problems),
        exits=tuple(_exits(manifest)),
        incident=text(manifest.get("incident")),
    )


# ---------------------------------------------------------------- manifest
def _read_manifest(root: Path, problems: list[str]) -> Mapping[str, Any]:
    path = _file_in(root, "manifest.json")
    if path is None:
        problems.append("manifest.json: absent; engines and GPUs are taken from the samples")
        return {}
    try:
        with path.open("rb") as file:
            manifest = json.loads(file.read(MAX_MANIFEST_BYTES))
    except OSError as error:
        problems.append(f"manifest.json: {error.strerror or 'cannot be read'}")
        return {}
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        problems.append("manifest.json: not a JSON object; engines and GPUs are unknown")
        return {}
    schema = manifest.get("schema")
    if schema is not None and schema != SCHEMA:
        problems.append(f"manifest.json: schema {schema!r} is not {SCHEMA!r}; read as far as known")
    return manifest


def _objects(manifest: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    rows = manifest.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _numbers(value: object) -> tuple[int, ...]:
    rows = value if isinstance(value, list) else []
    return tuple(found for row in rows if (found := count(row)) is not None)


def _engines(manifest: Mapping[str, Any]) -> list[RecordedEngine]:
    engines: dict[str, RecordedEngine] = {}
    for place, row in enumerate(_objects(manifest, "engines")):
        engine_id = text(row.get("id")) or f"{text(row.get('engine')) or 'engine'}-{place}"
        command, env = row.get("command"), row.get("env")
        engines[engine_id] = RecordedEngine(
            id=engine_id,
            engine=text(row.get("engine")),
            version=text(row.get("version")),
            command=tuple(map(str, command)) if isinstance(command, list) and command else None,
            env={str(name): str(value) for name, value in env.items()}
            if isinstance(env, dict)
            else {},
            pids=_numbers(row.get("pids")),
            gpus=_numbers(row.get("gpus")),
            log=text(row.get("log")),
            metrics_url=text(row.get("metrics_url")),
            started_at=moment(row.get("started_at")),
            ended=row.get("ended") is True,
        )
    return list(engines.values())


def _exits(manifest: Mapping[str, Any]) -> Iterator[EngineExit]:
    """How engines ended, as whoever recorded them saw it."""
    for row in _objects(manifest, "exits"):
        engine, where = text(row.get("engine")), text(row.get("where"))
        killed = row.get("oom_killed")
        if engine is not None and where is not None:
            yield EngineExit(
                engine=engine,
                where=where,
                at=moment(row.get("at")),
                exit_code=count(row.get("exit_code")),
                signal=count(row.get("signal")),
                oom_killed=killed if isinstance(killed, bool) else None,
                restarts=count(row.get("restarts")),
                detail=text(row.get("detail")),
            )


def _gpus(manifest: Mapping[str, Any]) -> list[Gpu]:
    return [
        Gpu(
            index=count(row.get("index")),
            uuid=text(row.get("uuid")),
            name=text(row.get("name")),
            total_bytes=count(row.get("total_bytes")) or None,
        )
        for row in _objects(manifest, "gpus")
    ]


# ---------------------------------------------------------------- samples and files
def _read_series(
    root: Path, engines: tuple[RecordedEngine, ...], gpus: tuple[Gpu, ...], problems: list[str]
) -> Series:
    totals = {gpu.index: gpu.total_bytes for gpu in gpus if gpu.index is not None}
    only_gpu = gpus[0].index if len(gpus) == 1 else None
    only_engine = engines[0].id if len(engines) == 1 else None
    return Series(
        gpus=read_samples(root, gpu_kind(totals, only_gpu), problems),
        gpu_processes=read_samples(root, gpu_process_kind(only_gpu), problems),
        processes=read_samples(root, process_kind(), problems),
        hosts=read_samples(root, host_kind(), problems),
        engines=read_samples(root, engine_kind(only_engine), problems),
    )


def _file_in(root: Path, name: str) -> Path | None:
    """A regular file inside `root`; None if it is absent or the name leads outside."""
    path = root / os.path.normpath(name)
    try:
        inside = path.resolve().is_relative_to(root.resolve())
        return path if inside and path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a link loop, a null byte, a name too long
        return None


def _files(root: Path, folder: str) -> list[Path]:
    try:
        names = sorted(entry.name for entry in (root / folder).iterdir())
    except OSError:
        return []
    return [path for name in names if (path := _file_in(root, f"{folder}/{name}"))]


def _find_logs(
    root: Path, engines: tuple[RecordedEngine, ...], problems: list[str]
) -> Mapping[str, str]:
    logs: dict[str, str] = {}
    for engine in engines:
        if engine.log is None:
            continue
        path = _file_in(root, engine.log)
        if path is None:
            problems.append(f"log of {engine.id!r}: {engine.log!r} is not in the recording")
        else:
            logs[engine.id] = str(path)
    others = [path for path in _files(root, "logs") if str(path) not in logs.values()]
    without = [engine.id for engine in engines if engine.id not in logs]
    if len(others) == 1 and len(without) == 1:
        logs[without[0]] = str(others[0])
    else:
        logs.update((path.name, str(path)) for path in others)
    return logs


def _find_pages(root: Path) -> list[RecordedPage]:
    pages = [
        RecordedPage(at=float(match[1]), engine=match[2], path=str(path))
        for path in _files(root, "metrics")
        if (match := _PAGE_NAME.fullmatch(path.name))
    ]
    return sorted(pages, key=lambda page: page.at)
