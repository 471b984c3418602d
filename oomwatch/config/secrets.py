"""Secrets that the configuration only names: read when they are used, so that they may change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from oomwatch.config.files import read_regular
from oomwatch.config.headers import parse_headers
from oomwatch.config.load import ConfigError
from oomwatch.config.paths import default_store, first_directory
from oomwatch.config.schema import Config, EngineConfig

_LONGEST_BYTES: Final = 64 * 1024


def read_secret(name: str, key: str, environ: Mapping[str, str] | None = None) -> str:
    """The text of a secret file, without the line break at its end.

    `name` is a path, or the bare name of a systemd credential (LoadCredential=), which is a file
    in $CREDENTIALS_DIRECTORY; `key` is the key that names it, for the message.

    Raises:
        ConfigError: there is no such file, or it cannot be the secret.

    """
    path = secret_path(name, key, environ)
    try:
        data = read_regular(path, _LONGEST_BYTES + 1)
    except PermissionError:
        raise ConfigError([f"{key}: {path} {_may_not_read(path)}"], is_sure=False) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError([f"{key}: {path} cannot be read: {reason}"]) from None
    if len(data) > _LONGEST_BYTES:
        raise ConfigError([f"{key}: {path} is too large for a secret"])
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError([f"{key}: {path} is not UTF-8 text"]) from None
    if not text:
        raise ConfigError([f"{key}: {path} is empty"])
    return text


def _may_not_read(path: Path) -> str:
    """Who may not, and what helps: the user of a service often is made for it at its start."""
    return (
        f"may not be read by {_user()}; let systemd pass it to the service: "
        f"LoadCredential={path.stem}:{path}, and write {path.stem} here"
    )


def _user() -> str:
    """The user that this process runs as, for a message."""
    import pwd  # noqa: PLC0415 - only for messages

    try:
        return f"the user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"the user {os.geteuid()}"


def secret_path(name: str, key: str, environ: Mapping[str, str] | None = None) -> Path:
    """Where a secret file is: a path, or a bare name that systemd has passed a credential by.

    Raises:
        ConfigError: systemd has passed none.

    """
    if "/" in name:
        return Path(name)
    directory = first_directory(os.environ if environ is None else environ, "CREDENTIALS_DIRECTORY")
    if directory is None:
        raise ConfigError(
            [
                f"{key} names the credential {name}, and systemd passed none: add "
                f"LoadCredential={name}:PATH to the service (`systemctl edit oomwatch`)"
            ],
            is_sure=False,
        )
    return directory / name


def engine_headers(
    engine: EngineConfig, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All headers to send to an engine; those of its file win.

    Raises:
        ConfigError: the file cannot be read, or is not one of headers.

    """
    headers = dict(engine.headers)
    if engine.headers_file is not None:
        key = f"headers_file of engine {engine.name}"
        headers.update(headers_in(engine.headers_file, key, environ))
    return headers


def headers_in(name: str, key: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The headers of a secret file; `key` is the key that names it.

    Raises:
        ConfigError: the file cannot be read, or is not one of headers.

    """
    text = read_secret(name, key, environ)
    try:
        return parse_headers(text)
    except ValueError as error:
        raise ConfigError([f"{key}: {name} {error}"]) from None


def store_address(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """The path or URL of the database that the agent writes.

    Raises:
        ConfigError: it is to be read from a file, which cannot be read.

    """
    store = config.store
    if store.url_file is not None:
        return read_secret(store.url_file, "store.url_file", environ)
    return store.url or store.path or str(default_store(os.environ if environ is None else environ))
