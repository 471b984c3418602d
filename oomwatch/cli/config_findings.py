"""What is odd about a configuration that is right in form: what it names is not there, and more.

Whoever asks may have other rights than the service, so all of it is a warning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from oomwatch.config import Config, ConfigError
from oomwatch.config.layers import KeyPath, called
from oomwatch.config.texts import in_force
from oomwatch.config.values import FilePath

if TYPE_CHECKING:
    from oomwatch.config.notify import SinkConfig


def unknown_causes(config: Config) -> Iterator[str]:
    """Causes that a receiver filters by and that there are not: it would be told nothing."""
    from oomwatch.causes import class_of
    from oomwatch.cli.explain import unknown_cause

    for sink in config.notify.sinks:
        for cause in sink.causes:
            if class_of(cause) is None:
                problem = unknown_cause(cause).removeprefix("oomwatch: ")
                yield f"causes of receiver {sink.name}: {problem}"


def findings(config: Config) -> list[str]:
    """All of the rest, one line each."""
    return [
        *_secrets(config),
        *_receivers([sink for sink in config.notify.sinks if sink.enabled]),
        *_export(config),
        *_open_files(config),
    ]


def _secrets(config: Config) -> Iterator[str]:
    from oomwatch.config.secrets import engine_headers, store_address

    try:
        store_address(config)
    except ConfigError as error:
        yield from error.problems
    for engine in config.engines:
        try:
            engine_headers(engine)
        except ConfigError as error:
            yield from error.problems


def _receivers(sinks: list[SinkConfig]) -> Iterator[str]:
    if not sinks:
        return
    from oomwatch.notify.sinks import make_sink

    for sink in sinks:
        try:
            make_sink(sink)
        except ConfigError as error:
            yield from error.problems


def _export(config: Config) -> Iterator[str]:
    from oomwatch.config.secrets import headers_in
    from oomwatch.export.access import load_access
    from oomwatch.export.server import is_open

    export = config.export
    try:
        load_access(export, os.environ)
    except ConfigError as error:
        yield from error.problems
    if export.users_file is None:
        for address in filter(is_open, export.listen):
            yield f"export.listen: whoever reaches {address} can read the metrics: set users_file"
    if export.textfile is not None and not Path(export.textfile).parent.is_dir():
        yield f"export.textfile: there is no folder {Path(export.textfile).parent}"
    if export.otlp.enabled and export.otlp.headers_file is not None:
        try:
            headers_in(export.otlp.headers_file, "export.otlp.headers_file")
        except ConfigError as error:
            yield from error.problems


def _open_files(config: Config) -> Iterator[str]:
    """Files of secrets that everybody on the host may read."""
    entries = list(in_force(config))
    names: dict[KeyPath, object] = {
        path: value for path, key, value in entries if key.name == "name"
    }
    for path, key, value in entries:
        if isinstance(key.kind, FilePath) and key.kind.secret and value and "/" in value:
            try:
                mode = Path(value).stat().st_mode
            except OSError:
                continue  # that it cannot be read is said where it is used
            if mode & stat.S_IROTH:
                yield (
                    f"{called(path, names)}: everybody on this host can read {value}: "
                    "chmod o-r, and pass it by LoadCredential= if the service then cannot"
                )
