"""Writes a recording: a directory, or a tar file of it, as the ending of its name says.

What is seen is appended line by line to files in a hidden directory beside the final name; only
`finish` gives it that name, whole. A full disk ends it with one line for the user and nothing left
behind. Files are 0600, directories 0700. All texts go through a `Redactor`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from oomwatch.errors import OomwatchError, UsageError
from oomwatch.records import EngineExit, Gpu, LogLine, RecordedEngine
from oomwatch.sources.log_render import render_line
from oomwatch.sources.logfile import read_pieces
from oomwatch.sources.logformat_lines import Piece
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.recording import SCHEMA
from oomwatch.sources.recording_rows import KIND_OF, AnySample, row_of
from oomwatch.sources.redaction import LogRedactor, Redactor

ENDINGS: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_OPEN_FILES: Final = 32
_STATIC: Final = ("ppid", "name", "cmdline", "cgroup", "unit", "container")
"""Of a process; they stand on a line only where they differ from those of the line before."""


class RecordingWriter:
    """One recording that is being written. Its methods may be called from any thread.

    All of them raise `OomwatchError` where the disk is full or the place may not be written; what
    was written so far is gone then.
    """

    def __init__(self, path: str, redactor: Redactor) -> None:
        """Raises `UsageError` where something of that name is there already."""
        self.path = Path(path)
        self.redactor = redactor
        self._lock = threading.Lock()
        self._files: dict[str, BinaryIO] = {}
        self._statics: dict[int, tuple[Any, ...]] = {}
        self._logs: dict[str, _LogFile] = {}
        self._closed = False
        if self.path.exists() or self.path.is_symlink():
            raise UsageError(f"{path} exists already: name another file or directory with -o")
        with self._guarded():
            parent = self.path.absolute().parent
            self._root = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=parent))

    # ---------------------------------------------------------------- what is seen
    def add_samples(self, samples: Iterable[AnySample]) -> None:
        """Append samples of any kind."""
        with self._lock, self._guarded():
            for sample in samples:
                row = row_of(sample)
                kind = KIND_OF[type(sample)]
                if kind == "process":
                    row = self._changed(row)
                self._append(f"{kind}.jsonl", _line(self.redactor.value(row)))

    def _changed(self, row: dict[str, Any]) -> dict[str, Any]:
        statics = tuple(map(str, (row.get(name) for name in _STATIC)))
        if self._statics.get(row["pid"]) == statics:
            return {name: value for name, value in row.items() if name not in _STATIC}
        self._statics[row["pid"]] = statics
        if row.get("cmdline"):
            row["cmdline"] = self.redactor.words(row["cmdline"])
        return row

    def log_name(self, engine_id: str, number: int = 0) -> str:
        """Where in the recording the log of an engine stands; `number` tells several apart."""
        name = self.redactor.name(engine_id)
        return f"logs/{name}.log" if not number else f"logs/{name}.{number}.log"

    def add_log(self, name: str, data: bytes) -> None:
        """Append whole lines of a log as they were read; `name` is that of `log_name`."""
        with self._lock, self._guarded():
            log = self._log(name)
            for line in log.raw(data):
                self._append(name, line)

    def add_lines(self, name: str, lines: Iterable[LogLine]) -> None:
        """Append lines of which the wrappers were taken off before."""
        with self._lock, self._guarded():
            log = self._log(name)
            for line in lines:
                self._append(name, log.rendered(line))

    def _log(self, name: str) -> _LogFile:
        return self._logs.setdefault(name, _LogFile(self.redactor))

    def add_kernel_line(self, text: str) -> None:
        """Append a line of the kernel's log."""
        with self._lock, self._guarded():
            self._append("kernel.log", self.redactor.text(_flat(text)))

    def add_page(self, at: float, engine_id: str, data: bytes) -> None:
        """Keep a metrics page as it came."""
        name = f"metrics/{at:.3f}.{self.redactor.name(engine_id)}.prom"
        lines = data.decode("utf-8", "replace").split("\n")
        with self._lock, self._guarded():
            self._append(name, "\n".join(map(self.redactor.text, lines)).removesuffix("\n"))
            self._files.pop(name).close()

    # ---------------------------------------------------------------- the end
    def finish(
        self,
        *,
        host: str | None,
        started_at: float,
        ended_at: float,
        engines: Iterable[RecordedEngine] = (),
        gpus: Iterable[Gpu] = (),
        exits: Iterable[EngineExit] = (),
        incident: str | None = None,
    ) -> Path:
        """Write the manifest and give the recording its name; `incident` is whose window it is."""
        manifest = {
            "schema": SCHEMA,
            "host": None if host is None else self.redactor.text(host),
            "started_at": started_at,
            "ended_at": ended_at,
            "engines": [self._engine(engine) for engine in engines],
            "gpus": [
                _known({n: getattr(gpu, n) for n in ("index", "uuid", "name", "total_bytes")})
                for gpu in gpus
            ],
            "exits": [
                self.redactor.value(
                    _known({name: getattr(each, name) for name in EngineExit.__dataclass_fields__})
                )
                for each in exits
            ],
            "redacted": self.redactor.privacy.redacts,
            **({} if incident is None else {"incident": incident}),
        }
        with self._lock, self._guarded():
            text = json.dumps(_finite(manifest), ensure_ascii=False, indent=1)
            self._append("manifest.json", text)
            self._close_files()
            self._put_in_place()
            self._closed = True
        return self.path

    def _engine(self, engine: RecordedEngine) -> dict[str, Any]:
        redactor = self.redactor
        row = _known(
            {
                "id": redactor.text(engine.id),
                "engine": engine.engine,
                "version": engine.version,
                "command": redactor.words(engine.command) if engine.command else None,
                "env": redactor.variables(engine.env),
                "pids": list(engine.pids),
                "gpus": list(engine.gpus),
                "metrics_url": redactor.text(engine.metrics_url) if engine.metrics_url else None,
                "started_at": engine.started_at,
                "ended": engine.ended or None,
            }
        )
        name = self.log_name(engine.id)
        return {**row, "log": name} if name in self._logs else row

    def _put_in_place(self) -> None:
        if not self.path.name.endswith(ENDINGS):
            self._root.rename(self.path)
            return
        handle, name = tempfile.mkstemp(
            prefix=f".{self.path.name}.", dir=self.path.absolute().parent
        )
        packed = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                _pack(self._root, file, self.path.name)
            packed.replace(self.path)
        except BaseException:
            packed.unlink(missing_ok=True)
            raise
        shutil.rmtree(self._root, ignore_errors=True)

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._close_files()
        shutil.rmtree(self._root, ignore_errors=True)

    # ---------------------------------------------------------------- files
    def _append(self, name: str, line: str) -> None:
        file = self._files.pop(name, None)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._open(name)
        self._files[name] = file  # the one used last is the last to be closed
        file.write(line.encode("utf-8", "replace") + b"\n")

    def _open(self, name: str) -> BinaryIO:
        path = self._root / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.fdopen(os.open(path, flags, 0o600), "ab")

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error of the disk as one line, with nothing left behind."""
        if self._closed:
            raise OomwatchError(f"{self.path}: the recording has ended")
        try:
            yield
        except OSError as error:
            if hasattr(self, "_root"):
                self.abandon()
            reason = error.strerror or str(error)
            raise OomwatchError(
                f"{self.path} cannot be written ({reason}); nothing of it was kept"
            ) from error


class _LogFile:
    """Lines of one log on their way into a recording."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._lines = LogRedactor(redactor)
        self._clock = Clock(None, None)

    def rendered(self, line: LogLine) -> str:
        """A line with a prefix of its own."""
        head = self._redactor.text(render_line(line, ""))
        return head + _flat(self._lines.line(line))

    def raw(self, data: bytes) -> Iterator[str]:
        """Each line as it was, where only its text had to be redacted; else with a new prefix."""
        texts = data.decode("utf-8", "replace").split("\n")
        # Numbers are those within the block; a wrapper may join lines, a line hold several.
        found: dict[int, list[LogLine]] = {}
        for line in read_pieces([Piece(1, data, joined=False)], "log", self._clock):
            found.setdefault(line.number, []).append(line)
        for number in sorted(found):
            lines = found[number]
            whole = texts[number - 1].rstrip("\r") if number <= len(texts) else ""
            if len(lines) == 1 and whole.endswith(lines[0].text) and whole.isprintable():
                head = whole[: len(whole) - len(lines[0].text)]
                yield self._redactor.text(head) + self._lines.line(lines[0])
            else:
                yield from map(self.rendered, lines)


def _pack(root: Path, file: IO[bytes], name: str) -> None:
    """The directory as a tar file; members stand below a folder of the recording's name."""
    folder = name
    for ending in sorted(ENDINGS, key=len, reverse=True):
        folder = folder.removesuffix(ending)
    with contextlib.ExitStack() as stack:
        target: Any = file
        if name.endswith((".gz", ".tgz")):
            target = stack.enter_context(
                gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
            )
        elif name.endswith(".zst"):
            import zstandard  # noqa: PLC0415 - only for archives packed with it

            target = stack.enter_context(
                zstandard.ZstdCompressor(level=6).stream_writer(file, closefd=False)
            )
        with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            archive.add(root, arcname=folder or "recording", filter=_anonymous)
    file.flush()
    os.fsync(file.fileno())


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the name of whoever packed it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False, separators=(",", ":"))


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _finite(value: Any) -> Any:
    """NaN and the infinities, which JSON lacks, as unknown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _flat(text: str) -> str:
    """One line."""
    return " ".join(text.splitlines()) if "\n" in text or "\r" in text else text
