"""How long a command takes to start, beside bare CPython with click, and a diagnosis of 1 MB.

usage: startup.py [--runs 9]

Each row is the median of the runs, which take turns, so that a busy moment hits all rows. Goals:
`--help` and `--version` at most 1.6 times CPython with click; a 1 MB log in at most 0.6 s.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from log_scan import write_log  # the file beside this one

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "cli"
BARE = [
    sys.executable,
    "-c",
    "import click\n"
    "@click.command()\n"
    "@click.option('--name', help='A name.')\n"
    "def command(name): pass\n"
    "command(['--help'])",
]


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    taken = time.perf_counter() - start
    assert done.returncode in (0, 1), done.stderr.decode()
    return taken


def write_failed_log(path: Path, size: int) -> None:
    """A busy server's log of about `size` bytes, which then fails to restart."""
    failure = (FIXTURES / "refused.log").read_bytes()
    write_log(path, size - len(failure))
    with path.open("ab") as out:
        out.write(failure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    oomwatch = [sys.executable, "-m", "oomwatch"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        write_failed_log(log, 2**20)
        rows = [
            ("python, click: --help", BARE),
            ("oomwatch --version", [*oomwatch, "--version"]),
            ("oomwatch --help", [*oomwatch, "--help"]),
            ("oomwatch diagnose --help", [*oomwatch, "diagnose", "--help"]),
            ("oomwatch diagnose, 1 MB", [*oomwatch, "diagnose", "--log", str(log)]),
        ]
        taken: dict[str, list[float]] = {name: [] for name, _ in rows}
        for turn in range(runs + 1):
            for name, command in rows:
                seconds = seconds_of(command)
                if turn:  # the first fills the caches
                    taken[name].append(seconds)
    bare = statistics.median(taken[rows[0][0]])
    print(f"{'':26}{'seconds':>9}{'x bare':>8}")
    for name, values in taken.items():
        middle = statistics.median(values)
        print(f"{name:26}{middle:9.3f}{middle / bare:8.2f}")


if __name__ == "__main__":
    main()
