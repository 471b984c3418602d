"""What is odd about a configuration that is right in form: what it needs is not there, and more.

Whoever asks may have other rights than the service, and systemd may pass it more: what such a
service could find all the same is never more than a warning.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oomwatch.config import Config, ConfigError
from oomwatch.config.layers import KeyPath, called
from oomwatch.config.texts import in_force
from oomwatch.config.values import FilePath

if TYPE_CHECKING:
    from oomwatch.config.notify import SinkConfig


class Oddity(NamedTuple):
    """One line, and whether the service would find the same."""

    text: str
    is_mistake: bool = False


def unknown_causes(config: Config) -> Iterator[Oddity]:
    """Causes that a receiver filters by and that there are not: it would be told nothing."""
    from oomwatch.causes import class_of
    from oomwatch.cli.explain import unknown_cause

    for sink in config.notify.sinks:
        for cause in sink.causes:
            if class_of(cause) is None:
                problem = unknown_cause(cause).removeprefix("oomwatch: ")
                yield Oddity(f"causes of receiver {sink.name}: {problem}", is_mistake=True)


def findings(config: Config) -> list[Oddity]:
    """All that is odd, one line each."""
    return [
        *unknown_causes(config),
        *_secrets(config),
        *_receivers([sink for sink in config.notify.sinks if sink.enabled]),
        *_export(config),
        *_open_files(config),
    ]


def _tried(read: Callable[[], object]) -> Iterator[Oddity]:
    """What is wrong with what the configuration names, by reading it."""
    try:
        read()
    except ConfigError as error:
        yield from (Oddity(problem, error.is_sure) for problem in error.problems)


def _secrets(config: Config) -> Iterator[Oddity]:
    from oomwatch.config.secrets import engine_headers, store_address

    yield from _tried(lambda: store_address(config))
    for engine in config.engines:
        yield from _tried(functools.partial(engine_headers, engine))


def _receivers(sinks: list[SinkConfig]) -> Iterator[Oddity]:
    if not sinks:
        return
    from oomwatch.notify.sinks import make_sink

    for sink in sinks:
        yield from _tried(functools.partial(make_sink, sink))


def _export(config: Config) -> Iterator[Oddity]:
    from oomwatch.config.secrets import headers_in
    from oomwatch.export.access import load_access
    from oomwatch.export.server import is_open

    export = config.export
    yield from _tried(lambda: load_access(export, os.environ))
    if export.users_file is None:
        for address in filter(is_open, export.listen):
            yield Oddity(
                f"export.listen: whoever reaches {address} can read the metrics: set users_file"
            )
    if export.textfile is not None and not Path(export.textfile).parent.is_dir():
        yield Oddity(f"export.textfile: there is no folder {Path(export.textfile).parent}")
    if export.otlp.enabled and export.otlp.headers_file is not None:
        name = export.otlp.headers_file
        yield from _tried(lambda: headers_in(name, "export.otlp.headers_file"))


def _open_files(config: Config) -> Iterator[Oddity]:
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
                yield Oddity(
                    f"{called(path, names)}: everybody on this host can read {value}: "
                    "chmod o-r, and pass it by LoadCredential= if the service then cannot"
                )
