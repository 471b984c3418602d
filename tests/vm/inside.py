"""Runs as root under the systemd of the virtual machine: two engines, each killed for memory.

The agent is installed by ``oomwatch service install`` and runs as its unit says: unprivileged, with
the journal as its way to the kernel log. One engine is a unit with ``MemoryMax=``, the other has
the memory of the host. Each kill must become one incident, of the right engine, with the right
cause. Only limits of time that are there for the emulation are lifted.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stand_in

LIMIT = "96M"
PATIENCE_SECONDS = 300.0
SETTLE_SECONDS = 30.0
"""Other witnesses of the same kill, and the second and third look at an incident, come later."""
KILLS = {"cgroup_oom", "kernel_oom"}
FAILURES = KILLS | {"log_failure", "process_exit", "restart_loop"}
BEGUN = time.monotonic()

DROP_IN = """[Service]
TimeoutStartSec=15min
WatchdogSec=15min
"""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def run(*words: str) -> str:
    """What a command prints; its failure ends the test."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(words)}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def fail(text: str) -> None:
    print(f"FAILED: {text}", flush=True)
    words = ["journalctl", "--quiet", "-u", "oomwatch.service", "-n", "40"]
    print(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    print("== end", flush=True)
    sys.exit(1)


def journal(*match: str) -> Iterator[dict[str, Any]]:
    lines = run("journalctl", "--quiet", "--output=json", *match).splitlines()
    for entry in map(json.loads, lines):
        if isinstance(entry.get("MESSAGE"), str):
            yield entry


def told(since: float) -> tuple[float, str] | None:
    """The first line of the agent's since then that tells of an incident, and its time."""
    for entry in journal("--unit=oomwatch.service"):
        at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        if at >= since and re.search(r"\binc-\w+ \w*(oom|exit|failure)", entry["MESSAGE"]):
            return at, entry["MESSAGE"]
    return None


def killed(pid: int) -> tuple[float, str] | None:
    """When the kernel said that it killed the process: by its own clock, not the journal's."""
    for entry in journal("--dmesg"):
        if re.search(rf"Killed process {pid}\b", entry["MESSAGE"]):
            since_boot = int(entry["_SOURCE_MONOTONIC_TIMESTAMP"]) / 1e6
            return time.time() - time.monotonic() + since_boot, entry["MESSAGE"]
    return None


def wait_for(answer: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if found := answer():
            return found
        time.sleep(0.5)
    fail(f"not within {PATIENCE_SECONDS:g} s: {what}")
    raise AssertionError


class Engine:
    """A stand-in server as a unit of its own, whose log is the journal."""

    def __init__(self, unit: str, port: int, *properties: str) -> None:
        self.unit = unit
        self.id = f"vllm-{port}"
        self.folder = Path("/opt", unit)
        self.folder.mkdir()
        program = self.folder / "vllm"
        program.write_text(stand_in.SERVER)
        (self.folder / "server.log").symlink_to("/proc/self/fd/1")
        state = {"page": "figures", "load": 0, "told": 0, "orphaned": False}
        (self.folder / "state").write_text(json.dumps(state))
        words = ["systemd-run", "--quiet", f"--unit={unit}", f"--setenv=STAND_IN={self.folder}"]
        words += [f"--property={one}" for one in properties]
        run(*words, "/usr/bin/python3", str(program), "serve", "/models/m", "--port", str(port))

    def core(self) -> int | None:
        """The process of its engine core."""
        group = Path(f"/sys/fs/cgroup/system.slice/{self.unit}.service/cgroup.procs")
        for pid in group.read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
                return int(pid)
        return None

    def is_watched(self) -> bool:
        """Whether the agent's status line names it."""
        status = run("systemctl", "show", "oomwatch.service", "--property=StatusText", "--value")
        return self.id in status

    def eat(self) -> None:
        """Let its core take memory until it is killed."""
        (self.folder / "eat").touch()


def failures() -> list[dict[str, Any]]:
    """Incidents that some engine failed, oldest first; pressure before it is no failure."""
    found = reversed(json.loads(run("oomwatch", "incidents", "list", "--json"))["incidents"])
    return [one for one in found if FAILURES & {t["kind"] for t in one["triggers"]}]


def kill(engine: Engine, witness: str, whose: str) -> str:
    """Have the kernel kill an engine's core; the id of the one incident that this became."""
    core = engine.core()
    before = {one["id"] for one in failures()}
    engine.eat()
    killed_at, line = wait_for(lambda: killed(core), f"the kernel kills the core of {engine.id}")
    say(f"kernel: {line}")
    told_at, line = wait_for(lambda: told(killed_at), "the agent tells of an incident")
    say(f"agent:  {line}")
    say(f"{told_at - killed_at:.2f} s from the kill to the incident")
    time.sleep(SETTLE_SECONDS)
    new = [one for one in failures() if one["id"] not in before]
    for one in new:
        say(f"{one['id']} {one['engine']} {one['cause']}")
        for trigger in one["triggers"]:
            say(f"  {trigger['kind']}: {trigger['text']}")
    if len(new) != 1:
        fail(f"{len(new)} incidents for one kill")
    if new[0]["engine"] != engine.id:
        fail(f"attributed to {new[0]['engine']}, not to {engine.id}")
    if new[0]["cause"] != "host_oom_kill":
        fail(f"explained as {new[0]['cause']}")
    kills = [t for t in new[0]["triggers"] if t["kind"] in KILLS]
    if witness not in {trigger["kind"] for trigger in kills}:
        fail(f"nothing from {witness}")
    if {trigger["pid"] for trigger in kills} - {None} != {core}:
        fail(f"told of other processes than {core}")
    if not any(whose in trigger["text"] for trigger in new[0]["triggers"]):
        fail(f"nobody says that it was {whose}")
    return new[0]["id"]


def main() -> None:
    print("== begin", flush=True)
    say(run("uname", "-r").strip() + ", " + run("systemctl", "--version").splitlines()[0])
    limited = Engine("limited", 8101, f"MemoryMax={LIMIT}", "MemorySwapMax=0")
    unlimited = Engine("unlimited", 8102)
    drop_ins = Path("/etc/systemd/system/oomwatch.service.d")
    drop_ins.mkdir(parents=True)
    (drop_ins / "emulated.conf").write_text(DROP_IN)
    run("oomwatch", "service", "install", "--exec-path", "/usr/local/bin/oomwatch")
    say("the agent is ready")
    for engine in (limited, unlimited):
        wait_for(engine.core, f"{engine.id} has a core")
        wait_for(engine.is_watched, f"the agent sees {engine.id}")
    say("it sees both engines")
    say(f"-- a kill at MemoryMax={LIMIT}")
    first_id = kill(limited, "cgroup_oom", "its own memory limit (cgroup)")
    say("-- a kill on a host without memory")
    second_id = kill(unlimited, "kernel_oom", "the whole host's memory")
    if [one["id"] for one in failures()] != [first_id, second_id]:
        fail("more incidents than kills")
    for entry in journal("--unit=oomwatch.service"):
        if re.search("Traceback|internal fault|reception only permitted", entry["MESSAGE"]):
            fail(entry["MESSAGE"])
    say("one incident for each kill, of the right engine, with the right cause")
    print("== end", flush=True)


main()
