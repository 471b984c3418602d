"""Load the configuration: find the file, lay the layers over each other, read every value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oomwatch.config.fields import Key, members
from oomwatch.config.headers import Headers, looks_secret
from oomwatch.config.layers import (
    KeyPath,
    Layers,
    Origin,
    add_environment,
    add_file,
    add_overrides,
    dotted,
    parse_toml,
)
from oomwatch.config.paths import config_paths
from oomwatch.config.schema import Config
from oomwatch.config.values import Url, url_has_secret
from oomwatch.errors import UsageError

_DEFAULT = Origin("default")


class ConfigError(UsageError):
    """The configuration is wrong; the message is one line and names the key.

    `problems` are all the mistakes, one line each; the message is the first of them. `is_sure` is
    False where another user may read what this one may not, or systemd may pass it to the service.
    """

    def __init__(self, problems: Iterable[str], *, is_sure: bool = True) -> None:
        self.problems = tuple(problems)
        self.is_sure = is_sure
        rest = len(self.problems) - 1
        more = f" (and {rest} more: see `oomwatch config check`)" if rest > 0 else ""
        super().__init__(self.problems[0] + more)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with where each value is from, by dotted key, and what is odd about it."""

    config: Config
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()
    path: Path | None = None
    """The file that was read; None if there is none."""


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    strict: bool = False,
) -> Loaded:
    """The configuration in force: flag over environment over file over default.

    Args:
        path: the file; by default $OOMWATCH_CONFIG, then the usual places, where it may be missing.
        environ: variables, those of the process by default.
        overrides: flags, by dotted key; values as TOML has them, or as text.
        strict: a key that is not known is a mistake, not a warning.

    Raises:
        ConfigError: the file cannot be read, or something in it, the environment or a flag is
            wrong.

    """
    environ = os.environ if environ is None else environ
    layers = Layers()
    found = _find(path, environ, layers)
    if found is not None:
        file, data = found
        document = parse_toml(data, file)
        if isinstance(document, str):
            raise ConfigError([document])
        add_file(layers, document, file)
    add_environment(layers, environ)
    add_overrides(layers, overrides or {})
    (layers.errors if strict else layers.warnings).extend(layers.unknown)

    origins: dict[str, Origin] = {}
    config = _build(layers, Config, (), origins)
    if layers.errors:
        raise ConfigError(layers.errors)
    return Loaded(config, origins, tuple(layers.warnings), found[0] if found else None)


def _find(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str], layers: Layers
) -> tuple[Path, bytes] | None:
    """The file and its bytes. One that was named must be there; of the usual places none need."""
    named = path or environ.get("OOMWATCH_CONFIG")
    if named:
        file = Path(named)
        try:
            return file, file.read_bytes()
        except OSError as error:
            raise ConfigError([f"{file}: cannot be read: {_reason(error)}"]) from None
    places = config_paths(environ)
    for file in places:
        try:
            return file, file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = f"{file}: cannot be read: {_reason(error)}"
            # A person may have a file of their own beside the system's; a service has one.
            if not isinstance(error, PermissionError) or file == places[-1]:
                raise ConfigError([problem]) from None
            layers.warnings.append(f"{problem}; it is left out")
    return None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _build(layers: Layers, cls: type[Any], path: KeyPath, origins: dict[str, Origin]) -> Any:
    """One section, with the defaults for what no layer gives or gives wrong."""
    given: dict[str, Any] = {}
    faults = len(layers.errors)
    for member in members(cls):
        here = (*path, member.name)
        if isinstance(member, Key):
            given[member.field] = _read(layers, member, here, origins)
        elif member.repeated:
            numbers = sorted({int(one[len(here)]) for one in layers.settings if _below(one, here)})
            if numbers != list(range(len(numbers))):
                layers.errors.append(
                    f"{dotted(here)} numbers must follow each other from 0, not be "
                    f"{', '.join(map(str, numbers))}"
                )
            given[member.field] = tuple(
                _build(layers, member.cls, (*here, str(number)), origins) for number in numbers
            )
        else:
            given[member.field] = _build(layers, member.cls, here, origins)
    section = cls(**given)
    # Values that do not go together are only worth a word if each is right by itself.
    if len(layers.errors) == faults and hasattr(section, "problems"):
        for name, problem in section.problems():
            full = (*path, *name.split("."))
            blamed = _blamed(origins, dotted(full), dotted(path))
            layers.errors.append(f"{blamed}{layers.called(full)} {problem}")
    return section


def _blamed(origins: Mapping[str, Origin], name: str, section: str) -> str:
    """Where the key was given, or what else of its section: one of them is to be changed."""
    others = (origin for key, origin in origins.items() if key.startswith(f"{section}."))
    candidates = (origins.get(name, _DEFAULT), *others)
    return next((f"{origin}: " for origin in candidates if origin.layer != "default"), "")


def _below(path: KeyPath, section: KeyPath) -> bool:
    return len(path) > len(section) and path[: len(section)] == section


def _read(layers: Layers, key: Key, path: KeyPath, origins: dict[str, Origin]) -> Any:
    name = dotted(path)
    setting = layers.settings.get(path)
    if setting is None:
        origins[name] = _DEFAULT
        return key.default
    origins[name] = setting.origin
    try:
        value = key.kind.read(setting.value, text=setting.text)
    except ValueError as error:
        layers.errors.append(f"{setting.origin}: {layers.called(path)} {error}")
        return key.default
    if setting.origin.layer == "file" and _is_inline_secret(key, value):
        layers.warnings.append(
            f"{setting.origin}: {layers.called(path)} holds a secret that all can read who can "
            f"read this file; put it into a file of its own{_instead(key.name)}"
        )
    return value


def _is_inline_secret(key: Key, value: Any) -> bool:
    if isinstance(key.kind, Headers):
        return looks_secret(value)
    return isinstance(key.kind, Url) and url_has_secret(value)


def _instead(name: str) -> str:
    return {"headers": " and name it as headers_file", "url": " and name it as url_file"}.get(
        name, ""
    )
