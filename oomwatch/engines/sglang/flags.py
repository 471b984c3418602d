"""SGLang's memory options by release: what is accepted, how it is spelled, what holds otherwise.

Read in 36 releases from 0.1.26 to 0.5.23; the table is `data/sglang_flags.json` and holds only
options that bear on memory, so an option that is not in it is not known to be valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines import versions
from oomwatch.engines.patterns import LARGEST
from oomwatch.engines.versions import Release
from oomwatch.units import GIB, MIB

ENGINE: Final = "sglang"


def fault(at: Release, flag: str, value: object) -> str | None:
    """What is known against a flag and its value at a release, or None."""
    name = flag.split(".", maxsplit=1)[0].replace("_", "-") if flag.startswith("--") else flag
    floor = versions.standing_for(ENGINE, at)
    rows = versions.table(ENGINE)["flags"]
    row = rows.get(name) or next((r for r in rows.values() if name in r.get("aliases", ())), None)
    if row is None or at < versions.sampled(ENGINE)[0] or not _holds(row, floor):
        return f"is not an option that is known for sglang {'.'.join(map(str, at))}"
    choices = next(
        (
            list_
            for span, list_ in row.get("choices", {}).items()
            if versions.span_holds(span, floor)
        ),
        None,
    )
    bare = value is None or value is True or value == ""
    if choices and not bare and "." not in flag and str(value) not in choices:
        return f"does not take {value} in this release"
    return None


def spell(at: Release, flag: str, value: Any) -> tuple[str, Any] | None:
    """The spelling of a setting at a release; None if the release has none."""
    floor = versions.standing_for(ENGINE, at)
    if flag in ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"):
        flag = "--cuda-graph-max-bs-decode" if floor >= (0, 5, 14) else "--cuda-graph-max-bs"
    elif flag == "--kv-cache-dtype" and value == "fp8":
        value = "fp8_e4m3" if floor >= (0, 4, 2) else "fp8_e5m2"
    if value is False:  # no switch of SGLang has a form for off
        return None
    written = True if value is True else str(value)
    return None if fault(at, flag, written) else (flag, written)


def defaults(
    at: Release | None,
    given: Mapping[str, Any],
    *,
    total_bytes: int | None,
    max_model_len: int | None,
) -> dict[str, Any]:
    """Values in force for what was not given, as numbers; a value that cannot be known is absent."""
    floor = versions.standing_for(ENGINE, at) if at else None
    found: dict[str, Any] = {
        flag: value
        for flag, row in versions.table(ENGINE)["flags"].items()
        if "default" in row and (floor is None or _holds(row, floor))
        for value in row["default"].values()
    }
    found["--kv-cache-dtype"] = "auto"
    if max_model_len is not None:
        found["--context-length"] = max_model_len
    chunk = _default_chunk(floor, total_bytes)
    if chunk is not None:
        found["--chunked-prefill-size"] = chunk
    ranks = _integer(given.get("--tp-size"), 1)
    chunk = _integer(given.get("--chunked-prefill-size"), chunk or 0)
    stages = _integer(given.get("--pp-size"), 1)
    fraction = _default_fraction(floor, total_bytes, chunk, ranks, stages)
    if fraction is not None:
        found["--mem-fraction-static"] = fraction
    return found


def _default_chunk(at: Release | None, total_bytes: int | None) -> int | None:
    """By memory of the card (0.5); 8192 on every larger card before."""
    if at is None or total_bytes is None or at < (0, 2, 15):
        return None
    size = total_bytes / GIB
    if at < (0, 4, 8):
        return 8192 if size >= 25 else None
    if size < (20 if at >= (0, 5, 20) else 35):
        return 2048
    return 4096 if size < 60 else 8192 if size < 160 else 16384


def _default_fraction(
    at: Release | None, total_bytes: int | None, chunk: int, ranks: int, stages: int
) -> float | None:
    """A table by ranks up to 0.4.7, a reserve from 0.5.3 on; in between, and on small cards, None.

    The reserve is in MB, whatever the source's comment says; the decode graphs are taken at the
    sizes of large cards (256, or 512 with four ranks and more).
    """
    if at is None:
        return None
    if at <= (0, 4, 7):
        return next(
            f
            for least, f in ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (0, 0.88))
            if ranks >= least
        )
    if at < (0, 5, 3) or total_bytes is None or total_bytes < 60 * GIB or chunk <= 0:
        return None
    card = total_bytes / MIB
    graphs = 512 if ranks >= 4 else 256
    reserve = max(512 + 1.5 * max(chunk, 2048) + 2 * graphs + 128 * ranks * stages, 10240)
    return round((card - reserve) / card, 2)


def _integer(value: Any, otherwise: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        return otherwise
    return number if abs(number) < LARGEST else otherwise


def _holds(row: Mapping[str, Any], at: Release) -> bool:
    since, gone = versions.release(row["since"]), versions.release(row.get("gone"))
    return (since is None or since <= at) and (gone is None or at < gone)
