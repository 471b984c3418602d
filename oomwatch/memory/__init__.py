"""The memory model: what a server would need and hold, as arithmetic on a model, a card and flags.

Pure functions on frozen dataclasses; only `config_source` reads files. Sizes are bytes per GPU
unless a name says otherwise. Start at `planner.plan`.
"""
