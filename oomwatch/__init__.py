"""oomwatch says what ran out of memory on an LLM server, why, and which flags fix it."""

__version__ = "0.1.0"
