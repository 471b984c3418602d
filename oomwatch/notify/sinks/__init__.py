"""The receivers of messages, one module each, named like their kind.

A module has `make(config, environ) -> Sink`. `config/sinks.py` declares the keys of each kind.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from oomwatch.config.notify import SinkConfig
from oomwatch.config.sinks import SINKS
from oomwatch.notify.outcome import Sink


def make_sink(config: SinkConfig, environ: Mapping[str, str] | None = None) -> Sink:
    """The receiver that a section of the configuration describes; only its module is imported.

    Raises:
        ConfigError: a secret or certificate that it needs is missing or unreadable.

    """
    kind = next(kind for kind, cls in SINKS.items() if type(config) is cls)
    module = importlib.import_module(f"{__name__}.{kind}")
    sink: Sink = module.make(config, os.environ if environ is None else environ)
    return sink
