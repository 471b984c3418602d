"""The real agent as a process, with a notify socket of its own and a store to look into."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stand_in import StandIn

from oomwatch.errors import OomwatchError
from oomwatch.records import Series, StoredIncident
from oomwatch.store.database import open_reader
from oomwatch.store.location import parse_store
from oomwatch.store.queries import list_incidents, read_events, read_window

QUICK = {"discovery.interval": "1s", "agent.burst_on": "[]"}
"""Settings under which a test need not wait."""


def configuration(engines: Iterable[StandIn], more: str = "") -> str:
    """A file that names these engines, so that what else runs here is left alone."""
    named = "".join(
        f'[[engine]]\nname = "{engine.id}"\nport = {engine.port}\n' for engine in engines
    )
    return f"schema_version = 1\n[discovery]\nenabled = false\n{named}{more}"


class RunningAgent:
    """`oomwatch agent` in the foreground, as systemd runs it; `start` again after its end."""

    def __init__(
        self,
        folder: Path,
        *engines: StandIn,
        environment: Mapping[str, str] | None = None,
        store: Path | None = None,
        **settings: str,
    ) -> None:
        self.folder = folder
        self.store = store or folder / "store.db"
        self.log = folder / "agent.log"
        self.states: list[str] = []
        self.config = folder / "oomwatch.toml"
        self.config.write_text(configuration(engines))
        self._settings = QUICK | {name.replace("__", "."): v for name, v in settings.items()}
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop("OOMWATCH_CONFIG", None)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(0.05)
        self.process: subprocess.Popen[bytes] | None = None

    # ---------------------------------------------------------------- life
    def start(self, *, ready: bool = True, **variables: str) -> RunningAgent:
        """Start it, and wait until it says that it is ready."""
        words = [sys.executable, "-m", "oomwatch", "agent", "--config", str(self.config)]
        words += ["--store", str(self.store)]
        for name, value in self._settings.items():
            words += ["--set", f"{name}={value}"]
        self.heard()  # what the process before has told
        self.states.clear()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                env=self._environment | {"NOTIFY_SOCKET": str(self.folder / "notify")} | variables,
            )
        if ready:
            self.wait_for(lambda: "READY=1" in self.heard(), "it is ready")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> tuple[int, float]:
        """End it as systemd does: exit status, and the seconds that it took."""
        assert self.process is not None
        begun = time.monotonic()
        self.send(signal.SIGTERM)
        status = self.process.wait(30)
        return status, time.monotonic() - begun

    def close(self) -> None:
        """End it, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._socket.close()

    # ---------------------------------------------------------------- what it says
    def heard(self) -> str:
        """All that it has told systemd."""
        with contextlib.suppress(TimeoutError):
            while True:
                self.states.append(self._socket.recv(65536).decode())
        return "\n".join(self.states)

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    # ---------------------------------------------------------------- what it stored
    def read(self, query: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a query gives; None where the store cannot be read now."""
        try:
            with open_reader(parse_store(str(self.store))) as connection:
                found = query(connection, *arguments, **options)
                return found if isinstance(found, Series | tuple) else list(found)
        except OomwatchError:
            return None

    def incidents(self, engine: str | None = None) -> list[StoredIncident]:
        """All incidents, or those of one engine, oldest first."""
        found = self.read(list_incidents, engine_id=engine) or ()
        return sorted(found, key=lambda incident: incident.opened_at)

    def of_kind(self, kind: str) -> list[StoredIncident]:
        """Incidents that a trigger of this kind is part of."""
        return [i for i in self.incidents() if any(t.kind == kind for t in i.triggers)]

    def samples(self, since: float = 0.0) -> Series:
        """All samples."""
        return self.read(read_window, since, time.time() + 86400, step=0) or Series()

    def numbers(self, engine: str) -> list[int]:
        """The numbered lines of a stand-in's log that were stored."""
        events = self.read(read_events, 0, time.time() + 86400, engine_id=engine) or ()
        texts = [getattr(event, "text", "") for _, event in events]
        return [int(t.rpartition("number ")[2].rstrip(".")) for t in texts if "number " in t]

    # ---------------------------------------------------------------- what it takes
    def threads(self) -> list[str]:
        """Names of its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sorted((task / "comm").read_text().strip() for task in tasks)

    def open_files(self) -> list[str]:
        """What its descriptors are."""
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(entry.readlink()).partition(":")[0])
        return sorted(found)

    def memory_mib(self, name: str = "VmRSS") -> float:
        """Its resident memory, or with VmHWM the most that it ever was."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) / 1024
        raise AssertionError(name)

    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    # ---------------------------------------------------------------- waiting
    def wait_for(self, answer: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
        """The answer, once it is there and not empty."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := answer():
                return found
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the agent ended before {what}:\n{self.said()[-3000:]}")
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds:g} s: {what}\n{self.said()[-3000:]}")

    def wait_for_engine(self, engine: str, pages: int = 1) -> None:
        """Until it has read so many pages of an engine."""
        self.wait_for(
            lambda: sum(s.engine == engine for s in self.samples().engines) >= pages,
            f"it reads the page of {engine}",
        )

    def settled(self) -> tuple[int, int]:
        """Threads and descriptors, once they are the same for a second and a half."""
        last, since = (0, 0), time.monotonic()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            now = (len(self.threads()), len(self.open_files()))
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > 1.5:
                return now
            time.sleep(0.1)
        return last
