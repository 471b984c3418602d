"""A recording of an incident, written for `oomwatch demo` and for the tests.

A server with a 131,072-token context limit and 32,768 tokens a step serves short chats at 11 % of
its KV cache, until one prompt of 96,211 tokens arrives: its first step wants 3.12 GiB for one
activation while 640 MiB of the card are free. No such machine existed; the figures add up.
"""

from __future__ import annotations

from pathlib import Path


def demo_recording() -> Path:
    """The directory of the recording."""
    return Path(__file__).parent / "recording"
