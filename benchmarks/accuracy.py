"""How near the memory model comes to what servers printed, per class of model.

usage: accuracy.py [STARTS.jsonl]

Each line of the file is one start from a public log: model (of the built-in table), card, version,
flags, and what was printed. Two questions are asked:
  given    the printed KV memory is handed over: tokens and concurrency must come out;
  scratch  nothing is: weights, KV memory and tokens must come out, and whether it starts.
Only starts whose flags are all known are judged from scratch. Exit status 1 when a limit is broken.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oomwatch.memory.budget import Known
from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import find_device
from oomwatch.memory.planner import PlanInput, plan
from oomwatch.units import GIB

LIMITS = (
    ("given_tokens", 0.5, 0.0005, "median error of tokens, given the pool"),
    ("given_tokens", 0.95, 0.003, "95th percentile of the same"),
    ("weights", 0.5, 0.003, "median error of weights"),
    ("weights", 0.95, 0.08, "95th percentile of the same"),
    ("scratch_tokens", 0.5, 0.014, "median error of tokens, from scratch"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when a limit is broken."""
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("starts.jsonl")
    starts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    records = [{"class": start["class"], **measure(start)} for start in starts]
    classes = sorted({record["class"] for record in records})
    print(f"{'class':10}{'starts':>7}{'tokens, pool given':>26}{'weights':>18}", end="")
    print(f"{'KV memory, scratch':>22}{'tokens, scratch':>18}{'starts':>10}")
    for name in [*classes, "all"]:
        print_row(name, [r for r in records if name in ("all", r["class"])])
    broken = [
        f"{text}: {value:.2%} > {limit:.2%}"
        for key, share, limit, text in LIMITS
        if (value := percentile(values(records, key), share)) is not None and value > limit
    ]
    wrong = sum(record["wrong_refusals"] for record in records)
    broken += [f"{wrong} wrong refusals"] if wrong else []
    print("limits kept" if not broken else "limits broken: " + "; ".join(broken))
    return 1 if broken else 0


def measure(start: dict[str, Any]) -> dict[str, Any]:
    """Errors of one start; a key is absent where nothing was printed."""
    record: dict[str, Any] = {"wrong_refusals": 0}
    device = find_device(start["gpu"])
    if "gpu_total_gib" in start:
        device = dataclasses.replace(device, total_bytes=int(start["gpu_total_gib"] * GIB))
    scratch = PlanInput(
        model=load_model(None, start["model"]).model,
        device=device,
        engine=start["engine"],
        version=start["version"],
        arguments=start.get("arguments", {}),
        env=start.get("env", {}),
    )
    found = plan(scratch)
    if "weights_gib" in start:
        record["weights"] = abs(found.budget.weights.bytes / GIB / start["weights_gib"] - 1)
    if start["known_flags"]:
        if "kv_gib" in start and found.kv_available_bytes + start["kv_gib"] > 0:
            record["scratch_gib"] = abs(found.kv_available_bytes / GIB - start["kv_gib"])
        if "tokens" in start:
            record["scratch_tokens"] = abs(found.tokens / start["tokens"] - 1)
        record["wrong_refusals"] += found.fits is start.get("refused", not found.fits)
    if "kv_gib" in start and "no_pool" not in start:
        known = Known(kv_available_bytes=int(start["kv_gib"] * GIB))
        given = plan(dataclasses.replace(scratch, known=known))
        if "tokens" in start:
            record["given_tokens"] = abs(given.tokens / start["tokens"] - 1)
        if "concurrency" in start:
            record["given_concurrency"] = abs(given.max_concurrency / start["concurrency"] - 1)
        record["wrong_refusals"] += given.fits is start.get("refused", not given.fits)
    return record


def print_row(name: str, records: Sequence[dict[str, Any]]) -> None:
    """One line: number, median and 95th percentile of each error."""
    pool, weights = values(records, "given_tokens"), values(records, "weights")
    memory, tokens = values(records, "scratch_gib"), values(records, "scratch_tokens")
    wrong = sum(record["wrong_refusals"] for record in records)
    print(f"{name:10}{len(records):>7}{spread(pool):>26}{spread(weights):>18}", end="")
    middle = percentile(memory, 0.5)
    shown = "-" if middle is None else f"{middle:.2f} / {max(memory):.2f} GiB"
    print(f"{shown:>22}{spread(tokens):>18}{'ok' if not wrong else f'{wrong} wrong':>10}")


def spread(errors: Sequence[float]) -> str:
    """Median and 95th percentile."""
    middle, high = percentile(errors, 0.5), percentile(errors, 0.95)
    return "-" if middle is None or high is None else f"{middle:.2%} / {high:.2%}"


def values(records: Iterable[dict[str, Any]], key: str) -> list[float]:
    """All figures of one kind, smallest first."""
    return sorted(record[key] for record in records if key in record)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank; None for no values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
