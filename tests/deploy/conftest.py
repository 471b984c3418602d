from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS / name) for name in ("agent", "export")]
