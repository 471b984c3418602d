"""The secrets of a receiver, read when they are used, so that they may change meanwhile."""

from __future__ import annotations

import re
from collections.abc import Mapping

from oomwatch.config.headers import parse_headers
from oomwatch.config.load import ConfigError
from oomwatch.config.notify import SinkConfig, variable_part
from oomwatch.config.secrets import read_secret


class Credentials:
    """What the keys ``*_file`` of a receiver name, or variables of the environment hold."""

    def __init__(self, config: SinkConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    def find(self, key: str) -> str | None:
        """The secret of a key (``url`` for ``url_file``); None if nothing gives it.

        Raises:
            ConfigError: its file cannot be read.

        """
        name = getattr(self._config, f"{key}_file")
        if name is None:
            return self._environ.get(self.variable(key)) or None
        return read_secret(name, f"{key}_file of receiver {self._config.name}", self._environ)

    def get(self, key: str, advice: str = "") -> str:
        """The same; without it there is nothing to be done."""
        found = self.find(key)
        if found is None:
            raise ConfigError(
                [
                    f"receiver {self._config.name} has no {key}_file; name a file that holds it, "
                    f"or set {self.variable(key)}{advice}"
                ]
            )
        return found

    def headers(self) -> dict[str, str]:
        """The lines of ``headers_file``."""
        text = self.find("headers")
        if text is None:
            return {}
        try:
            return parse_headers(text)
        except ValueError as error:
            raise ConfigError([f"headers_file of receiver {self._config.name} {error}"]) from None

    def url(self, key: str = "url") -> str:
        """An address, from ``url`` or from its file."""
        plain: str | None = getattr(self._config, key, None)
        url = plain or self.get(key)
        if not re.match(r"https?://[^\s/]+", url) or re.search(r"\s", url):
            raise ConfigError(
                [f"{key}_file of receiver {self._config.name} does not hold an http(s) address"]
            )
        return url

    def variable(self, key: str) -> str:
        """``OOMWATCH_NOTIFY_ONCALL_URL``."""
        return f"OOMWATCH_NOTIFY_{variable_part(self._config.name or '')}_{key.upper()}"
