"""Who may read the page over the network: a certificate, and a file of users."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import ssl
from collections.abc import Mapping

from oomwatch.config import ConfigError
from oomwatch.config.export import ExportConfig
from oomwatch.config.files import require_regular
from oomwatch.config.secrets import read_secret, secret_path


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How a listener lets in; without users everybody who can connect."""

    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)
    """Passwords by user."""

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header proves a user; compared in constant time."""
        if self.users is None:
            return True
        kind, _, encoded = authorization.partition(" ")
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return False
        found = [
            hmac.compare_digest(f"{user}:{password}".encode(), given)
            for user, password in self.users.items()
        ]
        return kind.lower() == "basic" and any(found)


def load_access(config: ExportConfig, environ: Mapping[str, str]) -> Access:
    """Read the files that the section names.

    Raises:
        ConfigError: one of them cannot be read or is not what it should be.

    """
    users = None
    if config.users_file is not None:
        text = read_secret(config.users_file, "export.users_file", environ)
        pairs = [line.partition(":") for line in text.splitlines() if line.strip()]
        if not pairs or not all(user and colon and secret for user, colon, secret in pairs):
            raise ConfigError(["export.users_file: each line must be user:password"])
        users = {user.strip(): secret for user, _, secret in pairs}
    return Access(_tls(config, environ), users)


def _tls(config: ExportConfig, environ: Mapping[str, str]) -> ssl.SSLContext | None:
    certificate, key = config.tls_certificate_file, config.tls_key_file
    if certificate is None or key is None:
        return None
    key_path = secret_path(key, "export.tls_key_file", environ)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    is_sure = True
    try:
        require_regular(certificate)
        require_regular(key_path)
        context.load_cert_chain(certificate, key_path, password="")
    except ssl.SSLError as error:
        reason = (error.reason or "no certificate with its key").lower().replace("_", " ")
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        is_sure = not isinstance(error, PermissionError)
    else:
        return context
    raise ConfigError(
        [f"export.tls_certificate_file, export.tls_key_file: {reason}"], is_sure=is_sure
    )
