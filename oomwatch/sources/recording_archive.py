"""Unpacks a recording that came as .tar, .tar.gz, .tar.xz or .tar.zst into a private directory.

An archive comes from somebody else: only regular files with the names of a recording are taken,
links, devices, absolute and climbing names are not, and the unpacked size is capped. The
compression is told by the first bytes, not by the name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gzip
import lzma
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from oomwatch.errors import SourceError

MAX_UNPACKED_BYTES: Final = 4 * 1024**3
MAX_FILES: Final = 100_000

# As contract names them, with or without one folder above.
_MEMBER: Final = re.compile(
    r"(?:\./)?(?:[^/]+/)?"
    r"(manifest\.json|(?:gpu|gpu_process|process|host|engine)\.jsonl|kernel\.log"
    r"|(?:logs|metrics)/[^/\x00-\x1f]+)"
)
_BLOCK_BYTES: Final = 1024 * 1024


def unpack_recording(
    path: Path, problems: list[str], *, max_bytes: int = MAX_UNPACKED_BYTES
) -> Path:
    """Directory with the files of the archive, removed when the program ends.

    A damaged or too large archive gives what could be read and says so in `problems`.

    Raises:
        SourceError: nothing of a recording is in it.
        OSError: the archive cannot be opened, or the disk is full.

    """
    directory = Path(tempfile.mkdtemp(prefix="oomwatch-recording-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _end_in_order()
    taken = 0
    try:
        with _decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = _MEMBER.fullmatch(member.name)
                if name is None or not member.isreg() or name[1].endswith(("/.", "/..")):
                    continue
                source = archive.extractfile(member)
                if source is None:
                    continue
                try:
                    size = _write(source, directory / name[1], max_bytes)
                except OSError as error:
                    if error.errno != errno.ENAMETOOLONG:
                        raise
                    continue
                max_bytes -= size
                taken += 1
                if max_bytes <= 0 or taken >= MAX_FILES:
                    problems.append("the archive is larger than the limit; the rest was not read")
                    break
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        problems.append("the archive is damaged or cut short; what could be read was used")
    if not taken:
        raise SourceError(f"{path}: not a recording: no manifest.json or sample files inside")
    return directory


def _write(source: IO[bytes], target: Path, max_bytes: int) -> int:
    target.parent.mkdir(exist_ok=True)
    written = 0
    with target.open("wb") as file:
        while written < max_bytes and (block := source.read(_BLOCK_BYTES)):
            part = block[: max_bytes - written]
            file.write(part)
            written += len(part)
    return written


@contextlib.contextmanager
def _decompressed(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            with gzip.open(file) as stream:
                yield stream  # type: ignore[misc]  # GzipFile reads like any binary file
        elif magic.startswith(b"\xfd7zXZ\x00"):
            with lzma.open(file) as stream:
                yield stream
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            import zstandard  # noqa: PLC0415 - only for archives packed with it

            try:
                with zstandard.ZstdDecompressor().stream_reader(
                    file, read_across_frames=True
                ) as stream:
                    yield stream
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
        else:
            yield file


def _end_in_order() -> None:
    """Let SIGTERM end the program as an exit does, or the directory would stay behind."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
