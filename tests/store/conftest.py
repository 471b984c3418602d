from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A real PostgreSQL on a socket of its own; its URL without a database name."""
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    found = shutil.which("initdb") or next(
        iter(sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), reverse=True)), None
    )
    if found is None:
        pytest.skip("no initdb: PostgreSQL is not installed")
    binaries = Path(found).resolve().parent
    as_user: list[str] = []
    # A short path of its own: socket names are limited, and the server refuses to run as root.
    root = Path("/tmp") / f"oomwatch-pg-{os.getpid()}"
    root.mkdir(mode=0o700)
    if os.geteuid() == 0:
        if shutil.which("runuser") is None or not _has_user("postgres"):
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        shutil.chown(root, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    data = root / "data"
    _run(
        [
            *as_user,
            str(binaries / "initdb"),
            "-D",
            str(data),
            "-U",
            "oomwatch",
            "-A",
            "trust",
            "-N",
        ],
    )
    options = f"-k {root} -c listen_addresses= -c fsync=off -c shared_buffers=16MB"
    control = [*as_user, str(binaries / "pg_ctl"), "-D", str(data), "-w", "-l", str(root / "log")]
    _run([*control, "-o", options, "start"])
    try:
        yield f"postgresql://oomwatch@/{{name}}?host={root}"
    finally:
        _run([*control, "-m", "immediate", "stop"])
        shutil.rmtree(root, ignore_errors=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _has_user(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@pytest.fixture
def postgres_store(postgres: str) -> Iterator[str]:
    """The URL of an empty database."""
    import psycopg

    name = f"store_{time.monotonic_ns()}"
    with psycopg.connect(postgres.format(name="postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    yield postgres.format(name=name)
    with psycopg.connect(postgres.format(name="postgres"), autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


class ServerToCome:
    """A database whose server cannot be reached before `come`: the folder of its socket is away."""

    def __init__(self, folder: Path, store: str) -> None:
        address, _, self._real = store.partition("?host=")
        self._folder = folder / "socket"
        self.url = f"{address}?host={self._folder}"

    def come(self) -> None:
        """Let it be reached."""
        self._folder.symlink_to(self._real)


@pytest.fixture
def server_to_come(postgres_store: str, tmp_path: Path) -> ServerToCome:
    return ServerToCome(tmp_path, postgres_store)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of either kind."""
    if request.param == "sqlite":
        made = Store(str(tmp_path / "oomwatch.db"))
    else:
        made = Store(request.getfixturevalue("postgres_store"))
    yield made
    made.writer.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    made = Store(str(tmp_path / "oomwatch.db"))
    yield made
    made.writer.close()
