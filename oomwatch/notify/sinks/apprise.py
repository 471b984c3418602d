"""Anything that Apprise knows, sent by a program of its own that ends with the message.

So the agent stays small, a service that hangs is ended with its program, and certificates, proxy
and redirects are ours to decide. Addresses go to it by its standard input: nobody sees them in the
list of processes.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import AppriseConfig
from oomwatch.notify import text
from oomwatch.notify.notice import Notice, notice_to_json
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused
from oomwatch.notify.sinks.base import BaseSink

_PROGRAM: Final = "oomwatch.notify.sinks.apprise_program"
_ADDRESS: Final = re.compile(r"[a-z0-9]{2,20}://\S+", re.IGNORECASE)
_START_SECONDS: Final = 30.0
"""What the program may take beside the time-out of the service."""
_REMEMBERED: Final = 200
_PREVIEW: Final = 2_048


def make(config: AppriseConfig, environ: Mapping[str, str]) -> AppriseSink:
    """Raises `ConfigError` if Apprise is not installed or there is no address."""
    return AppriseSink(config, environ)


class AppriseSink(BaseSink):
    """The addresses of one file. One that has taken a message is not sent it again."""

    kind = "apprise"
    groups = True
    per_second = 0.3
    """DingTalk and WeCom take 20 messages a minute."""

    def __init__(self, config: AppriseConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        if importlib.util.find_spec("apprise") is None:
            raise ConfigError(
                [f"receiver {self.name} needs Apprise: pip install 'oomwatch[apprise]'"]
            )
        self._config = config
        self._addresses()
        self._taken: collections.OrderedDict[str, set[str]] = collections.OrderedDict()
        """By message: the addresses that have taken it while others have not."""

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        taken = self._taken.get(notice.id, set())
        addresses = {
            number: address
            for number, address in enumerate(self._addresses(), 1)
            if _digest(address) not in taken
        }
        answers = self._run(notice, addresses)
        if isinstance(answers, Later):
            return answers
        said = {number: _outcome(number, answers.get(str(number))) for number in addresses}
        taken |= {_digest(addresses[n]) for n, one in said.items() if isinstance(one, Delivered)}
        later = [one for one in said.values() if isinstance(one, Later)]
        refused = [one for one in said.values() if isinstance(one, Refused)]
        if not later:
            self._taken.pop(notice.id, None)
            return refused[0] if refused else Delivered()
        self._taken[notice.id] = taken
        while len(self._taken) > _REMEMBERED:
            self._taken.popitem(last=False)
        return max(later, key=lambda one: one.after_seconds or 0.0)

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """Title and text, as long as WeCom takes them."""
        body = text.fit(notice, self.lang, _PREVIEW, lambda one: len(one.encode()))
        return f"{text.subject(notice, self.lang)}\n{body}"

    def _addresses(self) -> list[str]:
        lines = self._credentials.get("urls").splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        wrong = [n for n, line in enumerate(found, 1) if not _ADDRESS.fullmatch(line)]
        if wrong or not found:
            which = f"address {wrong[0]} is none" if wrong else "no address is there"
            raise ConfigError(
                [f"urls_file of receiver {self.name}: {which}; write one Apprise URL a line"]
            )
        return found

    def _run(self, notice: Notice, addresses: Mapping[int, str]) -> dict[str, Any] | Later:
        asked = {
            "addresses": addresses,
            "notice": notice_to_json(notice),
            "lang": self.lang,
            "timeout_seconds": self._config.timeout_seconds,
            "ca_file": self._config.ca_file,
        }
        seconds = self._config.timeout_seconds + _START_SECONDS
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", _PROGRAM],
                input=json.dumps(asked).encode(),
                capture_output=True,
                timeout=seconds,
                env=self._environment(),
                check=False,
            )
            answers = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return Later(f"apprise: no answer within {seconds:g} s")
        except (OSError, ValueError):
            return Later("apprise: the program that sends has failed")
        return answers if isinstance(answers, dict) else {}

    def _environment(self) -> dict[str, str]:
        """Of this process what the program needs, without the secrets of other receivers."""
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OOMWATCH_") and name != "CREDENTIALS_DIRECTORY"
        }
        if (proxy := self._config.proxy) is not None:
            names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
            own |= dict.fromkeys(names, proxy) | {"no_proxy": "", "NO_PROXY": ""}
        return own


def _outcome(number: int, answer: Any) -> Outcome:
    """What the program says of one address."""
    if not isinstance(answer, Mapping):
        return Later(f"address {number}: the program that sends said nothing")
    if answer.get("taken") is True:
        return Delivered()
    reason = f"address {number} ({answer.get('service', '?')}): {answer.get('reason', '?')}"
    if answer.get("later"):
        return Later(reason, answer.get("after_seconds"))
    return Refused(reason)


def _digest(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()
