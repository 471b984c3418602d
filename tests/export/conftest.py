from __future__ import annotations

import sys
from pathlib import Path

# The real agent and its stand-in engines are those of the agent's tests.
sys.path.append(str(Path(__file__).parent.parent / "agent"))
