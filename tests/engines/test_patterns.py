"""No line can keep a pattern busy: the time to search it grows with its length, not its square."""

from __future__ import annotations

import subprocess
import sys

CPU_SECONDS = 60
"""Some ten times what all searches below need; one quadratic pattern needs minutes."""

SEARCH_ALL = f"""
import resource
from oomwatch.diagnose.events import TABLE

resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
for pattern in TABLE.patterns:
    print(pattern.id, flush=True)
    sample = pattern.sample
    for unit in ("1", "a", " ", ".", "a "):
        run = unit * (40_000 // len(unit))
        for cut in {{0, len(sample) // 3, len(sample) * 2 // 3, len(sample) - 1, *ends(sample)}}:
            pattern.search(sample[:cut] + run + sample[cut:])
"""
ENDS = """
import re

def ends(sample):
    # Behind the numbers and the blanks, where the repeats of a pattern stand.
    return [match.end() for match in re.finditer(r"[0-9]+|[ :=]+", sample)][:6]
"""


def test_no_line_keeps_a_pattern_busy():
    done = subprocess.run(
        [sys.executable, "-c", ENDS + SEARCH_ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"busy with {done.stdout.split()[-1:]} {done.stderr[-300:]}"
