"""Cards by name: what CUDA calls their total memory, and their compute capability."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Final, Literal

from oomwatch.errors import UsageError
from oomwatch.memory.data.cards import CARDS, MIG_SLICES
from oomwatch.units import GIB

Vendor = Literal["nvidia", "amd"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG slice of it."""

    name: str
    total_bytes: int
    compute_capability: tuple[int, int] | None
    vendor: Vendor = "nvidia"
    unified: bool = False
    """Memory shared with the host: the total is what the host has."""
    nvlink: bool = False
    measured: bool = False
    """The total was read in a log; else it is the data sheet less what driver and ECC take."""

    @property
    def is_large(self) -> bool:
        """The class of card for which vLLM picks large default batches: 70 GiB and no A100."""
        return self.total_bytes >= 70 * GIB and "a100" not in self.name


_WORDS: Final = re.compile(r"[a-z]+|\d+")
_NOISE: Final = frozenset(  # words of NVML that do not tell cards apart
    {
        "nvidia",
        "geforce",
        "tesla",
        "quadro",
        "amd",
        "instinct",
        "radeon",
        "graphics",
        "gpu",
        "gb",
        "gib",
        "hbm",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "pcie",
        "sxm",
        "sxm2",
        "sxm3",
        "sxm4",
        "sxm5",
        "sxm6",
        "generation",
        "workstation",
        "server",
        "edition",
        "blackwell",
        "max",
        "q",
        "the",
        "ai",
        "accelerator",
        "laptop",
        "superchip",
    }
)


def find_device(name: str) -> Device:
    """The card with this short name, NVML name or sloppy spelling; also ``... MIG 3g.40gb``.

    Raises UsageError naming the nearest short names when it is not in the table.
    """
    text = name.strip().lower()
    mig = re.search(r"mig[ -]*(\d+g)\.(\d+)gb", text)
    # Laptop cards share a name with cards of another size.
    base = None if "laptop" in text else _closest(text[: mig.start()] if mig else text)
    if base is None:
        names = [card.short for card in CARDS]
        near = difflib.get_close_matches(text, names, 4, 0.4) or ["h100-80gb", "l40s", "rtx-4090"]
        raise UsageError(
            f"unknown GPU {name[:60]!r}; write a name such as {', '.join(near)}, "
            "or give its memory with --gpu-total-gib (all names: plan --list-gpus)"
        )
    if mig is None:
        return base
    share = MIG_SLICES.get(mig[1])
    if share is None:
        raise UsageError(f"unknown MIG profile {mig[0]!r}; give --gpu-total-gib")
    return dataclasses.replace(
        base,
        name=f"{base.name} mig {mig[1]}.{mig[2]}gb",
        total_bytes=int(base.total_bytes * share),
        measured=False,
    )


def known_names() -> list[str]:
    """The short names of all cards, as the table orders them."""
    return [card.short for card in CARDS]


def _closest(text: str) -> Device | None:
    """An exact short name, else the card whose words all occur; memory sizes decide ties."""
    squeezed = re.sub(r"[\s_]+", "-", text.strip(" -"))
    for card in CARDS:
        if squeezed == card.short:
            return _device(card.short)
    words = _WORDS.findall(text)
    joined = "".join(w for w in words if w not in _NOISE)
    best: tuple[int, str] | None = None
    for card in CARDS:
        for key in (card.short, *card.aliases):
            parts = [w for w in _WORDS.findall(key) if w not in _NOISE]
            model = "".join(parts)
            size = re.search(r"(\d+)gb$", key)
            bare = model[: -len(size[1])] if size and model.endswith(size[1]) else model
            if joined == model or (size and size[1] in words and joined.startswith(bare)):
                score = 100 + len(model)
            elif joined == bare or (bare and joined.startswith(bare)):
                score = len(bare)
            else:
                continue
            if best is None or score > best[0]:
                best = (score, card.short)
    return _device(best[1]) if best else None


def _device(short: str) -> Device:
    card = next(c for c in CARDS if c.short == short)
    return Device(
        name=card.short,
        total_bytes=int(card.total_gib * GIB),
        compute_capability=card.compute_capability,
        vendor="amd" if card.compute_capability is None else "nvidia",
        unified=card.unified,
        nvlink=card.nvlink,
        measured=card.measured,
    )
