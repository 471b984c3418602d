"""Which certificates are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomwatch.config.files import require_regular
from oomwatch.config.load import ConfigError

if TYPE_CHECKING:
    import ssl


def trust(ca_file: str | None, key: str) -> ssl.SSLContext:
    """The system's certificates, and those of a file; raises `ConfigError` for a bad file."""
    import ssl  # noqa: PLC0415 - 3 MB, only for addresses that want it

    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            require_regular(ca_file)
            context.load_verify_locations(ca_file)
        except ssl.SSLError:
            raise ConfigError([f"{key}: {ca_file} holds no PEM certificate"]) from None
        except OSError as error:
            reason = (error.strerror or "unreadable").lower()
            raise ConfigError(
                [f"{key}: {ca_file} cannot be read: {reason}"],
                is_sure=not isinstance(error, PermissionError),
            ) from None
    return context
