"""The cards people serve on.

`total_gib` is what cudaMemGetInfo reports. Measured totals were printed by engines in public logs;
the others are the data sheet's memory less what driver and ECC take on measured cards of the same
kind (about 1 % on HBM cards, 6 % on GDDR cards with ECC, 2 % on consumer cards).
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """One row of the table; sizes in GiB."""

    short: str
    total_gib: float
    compute_capability: tuple[int, int] | None
    aliases: tuple[str, ...] = ()
    measured: bool = False
    unified: bool = False
    nvlink: bool = False


CARDS: Final = (
    Card("t4", 14.74, (7, 5), measured=True),
    Card("v100-16gb", 15.77, (7, 0), ("v100",), nvlink=True),
    Card("v100-32gb", 31.73, (7, 0), nvlink=True),
    Card("rtx-2060", 12.0, (7, 5), measured=True),
    Card("rtx-2080-ti", 10.75, (7, 5)),
    Card("rtx-3060", 11.75, (8, 6)),
    Card("rtx-3060-ti", 7.66, (8, 6)),
    Card("rtx-3070", 7.66, (8, 6)),
    Card("rtx-3080", 9.65, (8, 6)),
    Card("rtx-3080-ti", 11.66, (8, 6)),
    Card("rtx-3090", 23.56, (8, 6), ("3090", "rtx-3090-ti"), measured=True),
    Card("rtx-4060-ti", 15.58, (8, 9), ("4060ti",)),
    Card("rtx-4070", 11.6, (8, 9)),
    Card("rtx-4070-ti-super", 15.58, (8, 9)),
    Card("rtx-4080", 15.58, (8, 9), ("4080", "rtx-4080-super")),
    Card("rtx-4090", 23.52, (8, 9), ("4090",)),
    Card("rtx-5070-ti", 15.47, (12, 0)),
    Card("rtx-5080", 15.47, (12, 0), ("5080",)),
    Card("rtx-5090", 31.36, (12, 0), ("5090",), measured=True),
    Card("rtx-a4000", 15.6, (8, 6)),
    Card("rtx-a5000", 23.5, (8, 6), ("a5000",)),
    Card("rtx-a6000", 47.5, (8, 6), ("a6000",), measured=True),
    Card("rtx-4000-ada", 19.5, (8, 9)),
    Card("rtx-6000-ada", 47.5, (8, 9), ("rtx6000ada",)),
    Card("rtx-pro-6000", 95.0, (12, 0), ("rtxpro6000",), measured=True),
    Card("l4", 21.95, (8, 9), measured=True),
    Card("l40", 44.42, (8, 9)),
    Card("l40s", 44.42, (8, 9), measured=True),
    Card("a10", 21.98, (8, 6)),
    Card("a10g", 21.98, (8, 6)),
    Card("a16", 14.53, (8, 6)),
    Card("a30", 23.5, (8, 0), nvlink=True),
    Card("a40", 44.35, (8, 6)),
    Card("a100-40gb", 39.4, (8, 0), ("a100", "a10040gb"), measured=True, nvlink=True),
    Card("a100-80gb", 79.15, (8, 0), measured=True, nvlink=True),
    Card("a800-80gb", 79.15, (8, 0), ("a800",), nvlink=True),
    Card("h100-80gb", 79.18, (9, 0), ("h100",), measured=True, nvlink=True),
    Card("h100-nvl-94gb", 93.1, (9, 0), ("h100nvl",), nvlink=True),
    Card("h800-80gb", 79.18, (9, 0), ("h800",), nvlink=True),
    Card("gh200-96gb", 94.5, (9, 0), ("gh200", "gh200480gb"), nvlink=True),
    Card("h20-96gb", 95.1, (9, 0), ("h20",), nvlink=True),
    Card("h20-141gb", 139.8, (9, 0), ("h20-3e",), nvlink=True),
    Card("h200-141gb", 139.8, (9, 0), ("h200", "h200nvl"), nvlink=True),
    Card("b200-180gb", 178.4, (10, 0), ("b200",), nvlink=True),
    Card("gb200", 184.3, (10, 0), nvlink=True),
    Card("b300", 267.7, (10, 3), nvlink=True),
    Card("gb300", 276.6, (10, 3), measured=True, nvlink=True),
    Card("gb10", 121.7, (12, 1), ("dgxspark",), measured=True, unified=True),
    Card("jetson-orin-64gb", 61.4, (8, 7), ("orin", "jetsonagxorin"), unified=True),
    Card("jetson-thor", 122.8, (11, 0), ("thor", "jetsonagxthor"), unified=True),
    Card("strix-halo", 124.0, None, ("radeon-8060s",), measured=True, unified=True),
    Card("mi210", 63.98, None),
    Card("mi250x", 63.98, None),
    Card("mi300x", 191.98, None, ("mi300",), measured=True, nvlink=True),
    Card("mi325x", 255.98, None, nvlink=True),
    Card("mi350x", 287.98, None, nvlink=True),
    Card("mi355x", 287.98, None, measured=True, nvlink=True),
)

MIG_SLICES: Final = {"1g": 1 / 8, "2g": 1 / 4, "3g": 1 / 2, "4g": 1 / 2, "7g": 1.0}
"""Share of the card's memory by compute profile; 1g slices of double memory need a stated total."""
