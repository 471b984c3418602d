"""What all receivers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from oomwatch.config.load import ConfigError
from oomwatch.config.notify import SinkConfig
from oomwatch.notify.credentials import Credentials
from oomwatch.notify.notice import Notice
from oomwatch.notify.outcome import Delivered, Later, Outcome
from oomwatch.report.locale import Language


class BaseSink:
    """A receiver; subclasses say how one message is sent."""

    kind: ClassVar[str]
    groups: bool = False
    per_second: float = 10.0
    refresh_seconds: float | None = None

    def __init__(self, config: SinkConfig, environ: Mapping[str, str]) -> None:
        self.name = config.name or self.kind
        self.lang: Language = getattr(config, "lang", "en")
        self._credentials = Credentials(config, environ)

    def send(self, notice: Notice, thread: str | None) -> Outcome:
        """Send one message; a secret that cannot be read just now is a reason to wait."""
        try:
            return self._send(notice, thread)
        except ConfigError as error:
            return Later(str(error))

    def _send(self, notice: Notice, thread: str | None) -> Outcome:
        """Send it, or raise `ConfigError`."""
        raise NotImplementedError

    def refresh(self, notices: Sequence[Notice]) -> Outcome:
        """Tell again what is open: most receivers remember it."""
        try:
            return self._refresh(notices)
        except ConfigError as error:
            return Later(str(error))

    def _refresh(self, notices: Sequence[Notice]) -> Outcome:  # noqa: ARG002 - nothing to be done
        return Delivered()
