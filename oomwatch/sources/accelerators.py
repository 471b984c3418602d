"""Accelerators that the kernel shows, by vendor: so that another make is never called "no GPU".

Read from the PCI bus and the device nodes only; no vendor library is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NVIDIA: Final = "NVIDIA"

# PCI vendor ids of makers of accelerators; display adapters of servers (ASPEED, Matrox) are none.
_VENDORS: Final = {
    "0x10de": NVIDIA,
    "0x1002": "AMD",
    "0x8086": "Intel",
    "0x1da3": "Intel Gaudi",
    "0x19e5": "Huawei Ascend",
}
_DISPLAY: Final = 0x03  # PCI base class: display controller
_PROCESSING: Final = 0x12  # PCI base class: processing accelerator
_NODES: Final = {"kfd": "AMD", "davinci_manager": "Huawei Ascend", "hl0": "Intel Gaudi"}


def find_accelerators(*, sys_root: str = "/sys", dev_root: str = "/dev") -> tuple[str, ...]:
    """Vendors of GPUs and accelerators on this host, sorted; empty where none shows."""
    found = set()
    # "drm" has links to the PCI devices: enough where only that part of /sys is mounted.
    folders = [*Path(sys_root, "bus/pci/devices").glob("*")]
    folders += [card / "device" for card in Path(sys_root, "class/drm").glob("card*")]
    for folder in folders:
        vendor = _VENDORS.get(_word(folder / "vendor"))
        if vendor is None:
            continue
        kind = _word(folder / "class")
        base_class = int(kind, 16) >> 16 if kind.startswith("0x") else _DISPLAY
        if base_class in (_DISPLAY, _PROCESSING):
            found.add(vendor)
    found |= {vendor for node, vendor in _NODES.items() if Path(dev_root, node).exists()}
    if any(Path(dev_root).glob("davinci[0-9]*")):
        found.add("Huawei Ascend")
    if any(Path(dev_root).glob("nvidia[0-9]*")):
        found.add(NVIDIA)
    return tuple(sorted(found))


def is_wsl(*, proc_root: str = "/proc", dev_root: str = "/dev") -> bool:
    """Whether this is the Windows Subsystem for Linux, whose driver hides per-process figures."""
    if Path(dev_root, "dxg").exists():
        return True
    return "microsoft" in _word(Path(proc_root, "sys/kernel/osrelease")).lower()


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
