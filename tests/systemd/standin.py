"""A small service in place of the agent: what it tells systemd goes through oomwatch.sdnotify.

SIGHUP reloads, SIGTERM ends, SIGUSR1 stands still (no more signs of life). With a file
``exit-2`` in the state directory it ends at once, as after a wrong configuration.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from oomwatch import sdnotify

STATE = Path(os.environ["STATE_DIRECTORY"])


def try_to(action) -> str:
    """How an action ends: ``yes``, or the name of the error."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "yes"


def what_it_can_do() -> dict[str, object]:
    """What the sandbox allows, for the script that runs the test."""
    own = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "arguments": sys.argv[1:],
        "uid_is_root": os.getuid() == 0,
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "capabilities": own["CapEff"],
        "no_new_privileges": own["NoNewPrivs"],
        "seccomp": own["Seccomp"],
        "write_state": try_to(lambda: (STATE / "probe").write_text("x")),
        "write_etc": try_to(lambda: Path("/etc/oomwatch/probe").write_text("x")),
        "log_in_tmp": try_to(lambda: Path("/tmp/engine.log").read_text()),
        "write_tmp": try_to(lambda: Path("/tmp/probe").write_text("x")),
        "write_temporary": try_to(lambda: tempfile.TemporaryFile().close()),
        "read_config": try_to(
            lambda: Path(os.environ["CONFIGURATION_DIRECTORY"], "config.toml").read_text()
        ),
        "read_home": try_to(lambda: list(Path("/root").iterdir())),
        "read_cmdline_of_1": bool(Path("/proc/1/cmdline").read_bytes()),
        "read_cgroup_of_1": bool(Path("/proc/1/cgroup").read_bytes()),
        "read_environ_of_1": try_to(lambda: Path("/proc/1/environ").read_bytes()),
        "kernel_log": try_to(lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY))),
        "groups": sorted(os.getgroups()),
        "watchdog_interval": sdnotify.watchdog_interval(),
    }


def main() -> None:
    if (STATE / "exit-2").exists():
        sys.exit(2)
    going = {"on": True, "still": False, "reloads": 0}
    signal.signal(signal.SIGTERM, lambda *_: going.update(on=False))
    signal.signal(signal.SIGHUP, lambda *_: going.update(reloads=going["reloads"] + 1))
    signal.signal(signal.SIGUSR1, lambda *_: going.update(still=True))
    (STATE / "report.json").write_text(json.dumps(what_it_can_do()))
    time.sleep(1)  # a start takes a moment: systemctl must wait for it
    sdnotify.ready("watching nothing")
    reloads = 0
    interval = sdnotify.watchdog_interval() or 1.0
    while going["on"]:
        if going["reloads"] != reloads:
            reloads = going["reloads"]
            sdnotify.reloading()
            time.sleep(0.5)
            sdnotify.ready(f"reloaded {reloads}")
        if not going["still"]:
            sdnotify.watchdog()
        time.sleep(min(interval, 0.1))
    sdnotify.stopping("flushing")


main()
