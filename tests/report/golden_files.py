"""Expected outputs under golden/; OOMWATCH_UPDATE_GOLDEN=1 rewrites them for review."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("OOMWATCH_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    assert text == expected, f"{name} differs; OOMWATCH_UPDATE_GOLDEN=1 rewrites it"
