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


_NOISE: Final = re.compile(  # what the driver's names say beside the card: maker, line, form
    r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|graphics|gpu|nvgpu|pcie?|sxm\d?|dgxs|oam|vf"
    r"|hbm\de?|generation|workstation|server|edition|blackwell|max|q|the|ai|accelerator|superchip"
    r"|developer|kit"
)
_SIZE: Final = re.compile(r"(\d+) ?gi?b")
_NEAR_SIZE: Final = 0.1
"""How far CUDA's total may lie below the size that a card is sold with (A16, 9 %)."""


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
            f"unknown GPU {name[:60]!r}; did you mean {', '.join(near)}? Else give its memory with "
            "--gpu-total-gib (all names: plan --list-gpus)"
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
    """The card that a name stands for, word for word; a memory size decides between variants.

    What is left of a name has to be words that tell no cards apart: a longer number or one more
    word is another card (RTX A1000, A100X), never the one whose name it begins with.
    """
    joined = "".join(_kept(text))
    for card in CARDS:
        if any(joined == "".join(_kept(key)) for key in (card.short, *card.aliases)):
            return _device(card.short)
    words, size = _words(text)
    fitting = [
        card
        for card in CARDS
        if any(words == _words(key)[0] for key in (card.short, *card.aliases))
        and (size is None or _is_size(size, card.total_gib))
    ]
    return _device(fitting[0].short) if fitting else None


def _words(name: str) -> tuple[list[str], int | None]:
    """A name as letters and numbers that tell cards apart, and the memory size it states."""
    size = _SIZE.search(name)
    if size is not None:
        name = name.replace(size[0], " ")
    return re.findall(r"[a-z]+|\d+", " ".join(_kept(name))), int(size[1]) if size else None


def _kept(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name) if not _NOISE.fullmatch(word)]


def _is_size(stated: int, total_gib: float) -> bool:
    """Whether a card of this total may be sold with a size, in GB or GiB."""
    return abs(stated - total_gib) <= _NEAR_SIZE * stated


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
