"""How long a large healthy log takes: grep with our own words, the base install, the fast extra.

usage: log_scan.py [--size 1G] [--log PATH] [--runs 3]

Without --log, writes a log of that size to a temporary file and deletes it afterwards: a start,
then 85 % access lines, 10 % statistics, 5 % logged requests, as a busy server writes them. Each
row is the best of the runs, in a process of its own: time with its start, and its peak memory.
Goals: base at most 4 times grep, fast at most 1.2 times, memory the same at any size.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oomwatch.engines.literals import LITERALS

LINES_PER_BLOCK = 20_000
STARTUP = """\
(APIServer pid=4242) INFO 07-01 08:00:01 [api_server.py:1977] vLLM API server version 0.13.0
(APIServer pid=4242) INFO 07-01 08:00:01 [utils.py:253] non-default args: {'model': '/models/chat'}
(EngineCore pid=4300) INFO 07-01 08:00:09 [core.py:93] Initializing a V1 LLM engine (v0.13.0)
(EngineCore pid=4300) INFO 07-01 08:00:31 [kv_cache_utils.py:1291] GPU KV cache size: 412,672 tokens
INFO:     Application startup complete.
"""
QUESTIONS = ("Name a tree.", "How long is a marathon?", "Write two lines on rain.", "讲一个笑话。")


def make_block(seed: int) -> str:
    """One minute of a busy server's log; `MM-DD HH:MM` is left as a mark."""
    dice = random.Random(seed)  # noqa: S311 - a log, not a secret
    kinds = dice.choices(("access", "stats", "request"), weights=(85, 10, 5), k=LINES_PER_BLOCK)
    lines = []
    for i, kind in enumerate(kinds):
        head = f"(APIServer pid=4242) INFO MM-DD HH:MM:{i * 60 // LINES_PER_BLOCK:02d} "
        if kind == "access":
            network, host, port = dice.randrange(4), dice.randrange(1, 255), dice.randrange(60_000)
            address = f"10.0.{network}.{host}:{port}"
            lines.append(f'INFO:     {address} - "POST /v1/chat/completions HTTP/1.1" 200 OK')
        elif kind == "stats":
            prompt, generation = dice.uniform(200, 900), dice.uniform(300, 1200)
            lines.append(
                f"{head}[loggers.py:257] Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
                f"Avg generation throughput: {generation:.1f} tokens/s, "
                f"Running: {dice.randrange(24)} reqs, Waiting: 0 reqs, "
                f"GPU KV cache usage: {dice.uniform(3, 45):.1f}%, "
                f"Prefix cache hit rate: {dice.uniform(20, 60):.1f}%"
            )
        else:
            lines.append(
                f"{head}[logger.py:40] Received request chatcmpl-{dice.getrandbits(128):032x}: "
                f"prompt: {dice.choice(QUESTIONS)!r}, params: SamplingParams(n=1, "
                f"temperature={dice.random():.1f}, max_tokens={dice.choice((128, 512))}), "
                "lora_request: None."
            )
    return "\n".join(lines) + "\n"


def write_log(path: Path, size: int) -> None:
    """A log of about `size` bytes, in whole lines."""
    blocks = [make_block(seed) for seed in range(4)]
    minute, written = 8 * 60, 0
    with path.open("wb") as out:
        piece = STARTUP.encode()
        while written + len(piece) <= size:
            out.write(piece)
            written += len(piece)
            clock = f"07-{1 + minute // 1440 % 28:02d} {minute // 60 % 24:02d}:{minute % 60:02d}"
            piece = blocks[minute % 4].replace("MM-DD HH:MM", clock).encode()
            minute += 1
        piece = piece[: piece.rfind(b"\n", 0, size - written) + 1]
        out.write(piece)


def read_as_child(kind: str, path: str) -> None:
    """What a row's process runs: read the log, print the lines read and the peak memory."""
    from oomwatch.sources import scan  # noqa: PLC0415 - the import is part of what is measured
    from oomwatch.sources.logfile import read_log  # noqa: PLC0415

    if kind == "base":
        scan.hyperscan_look = lambda: None
    elif scan.hyperscan_look() is None:
        print("the fast extra is not installed")
        return
    lines = sum(1 for _ in read_log(path))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    print(f"{lines} {int(peak[1]) >> 10 if peak else 0}")


def measure(command: list[str], runs: int, env: dict[str, str]) -> tuple[float, str]:
    """Best time in seconds, and the last output."""
    best, output = float("inf"), ""
    for _ in range(runs):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        best = min(best, time.perf_counter() - start)
        output = done.stdout.strip() or done.stderr.strip()
    return best, output


def parse_bytes(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", default="1G", help="bytes, or with K, M, G")
    parser.add_argument("--log", type=Path, help="an existing log instead of a written one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_as_child(*args.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "server.log"
        if args.log is None:
            write_log(log, parse_bytes(args.size))
        words = Path(folder) / "words"
        words.write_bytes(b"\n".join(entry.text for entry in LITERALS) + b"\n")
        size = log.stat().st_size
        env = {**os.environ, "LC_ALL": "C"}
        rows = []
        if shutil.which("grep"):
            grep = ["grep", "-c", "-F", "-f", str(words), str(log)]
            rows.append(("grep -c -F -f", *measure(grep, args.runs, env)))
        for kind in ("base", "fast"):
            command = [sys.executable, __file__, "--read", kind, str(log)]
            rows.append((f"oomwatch, {kind}", *measure(command, args.runs, env)))
    print(f"{size / 1e6:,.0f} MB, {len(LITERALS)} words")
    print(f"{'':16}{'seconds':>9}{'MB/s':>8}{'x grep':>8}   output")
    for name, seconds, output in rows:
        ratio = f"{seconds / rows[0][1]:.2f}" if rows[0][0].startswith("grep") else "-"
        if name.startswith("oomwatch") and output[:1].isdigit():
            lines, peak = output.split()
            output = f"{lines} lines read, peak {peak} MiB"  # noqa: PLW2901 - shown, not kept
        elif name.startswith("grep"):
            output = f"{output} lines match"  # noqa: PLW2901
        print(f"{name:16}{seconds:9.2f}{size / seconds / 1e6:8.0f}{ratio:>8}   {output}")


if __name__ == "__main__":
    main()
