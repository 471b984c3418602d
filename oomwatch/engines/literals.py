"""Words that telling log lines contain and ordinary ones do not, for the first look at large logs.

Every line that can decide a diagnosis holds at least one of them: errors, refusals of memory, kills,
crashes, shutdowns, pressure on the KV cache, and statistics at 90 % use of it or more. What a busy
healthy server writes (access lines, statistics, request logs) holds none, or is told apart by
`confirm` and `CLIENT_MARKS`. Lower-case beginnings are left off where both spellings occur.

The list is short on purpose: the base installation searches for each word in turn.
`tests/sources/test_logfile_scan.py` holds it against the sample lines of all patterns.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """One word; where it is common, `confirm` is what makes its line a telling one."""

    text: bytes
    confirm: bytes | None = None
    """A regular expression that must match where the word stands."""
    alone: bool = False
    """Whether the line says all by itself, so that its neighbours need not be read."""


LITERALS: Final = (
    Literal(b"emory"),  # out of memory, OutOfMemoryError, available KV cache memory, memory access
    Literal(b"rror"),  # every exception's last line, CUDA error, argparse's error
    Literal(b"ERROR"),
    Literal(b"Traceback (most"),
    # vLLM prints percent, SGLang a ratio: "KV cache usage: 97.3%", "token usage: 0.95".
    Literal(b"usage: ", confirm=rb"usage: (?:9\d\.|100|0\.9|1\.0)", alone=True),
    Literal(b"etract"),  # SGLang: retract, retracted
    Literal(b"preempt"),
    Literal(b"fail"),
    Literal(b"illed"),  # Killed, killed by SIGKILL
    Literal(b" died"),
    Literal(b"unexpectedly"),
    Literal(b"root cause"),
    Literal(b"Shutting down"),
    Literal(b"hutdown"),  # [shutdown], Shutdown initiated, Server shutdown requested
    Literal(b"SIGTERM"),
    Literal(b"Watchdog"),
    Literal(b"terminate called"),
    Literal(b"is too long"),
    Literal(b"profiled value -"),  # SGLang: a pool of less than nothing
)

CLIENT_MARKS: Final = (
    b"Received request ",  # vLLM --enable-log-requests
    b"Generated response ",
    b"Receive: obj=",  # SGLang --log-requests
    b"Finish: obj=",
)
"""Lines with one of these hold what a client sent: their words count for nothing."""

ACCESS_END: Final = b"200 OK"
"""How the access lines of served requests end: six of seven lines of a busy server."""

BANNERS: Final = (
    b"vLLM API server version",
    "▀▄▀ █  version ".encode(),
    b"server_args=ServerArgs(",
    b"Args { model_id",
)
"""With what a server begins its log: vLLM since 0.2, vLLM since 0.18 (its logo), SGLang, TGI."""
