"""Takes out of texts what is nobody else's business, the same way wherever it turns up.

Keys and tokens become ``***`` always. By the configuration's ``[privacy]`` also: what clients sent
becomes ``[redacted]``, home directories and the users' names ``user1``, ``user2``, …, host names
``host1``, …. One `Redactor` serves a whole recording, so that a name is replaced by the same word
in every file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oomwatch.engines.client_text import client_head, is_client_text, without_input_values
from oomwatch.engines.secrets import HIDDEN, hide_text, hide_values, hide_words, is_secret
from oomwatch.records import LogLine

REDACTED: Final = "[redacted]"
_MAX_OPEN_LINES: Final = 10_000
"""Lines that one request may go on for in a log; what follows then is the server's own."""

_HOME: Final = re.compile(r"(?i:(/home/|/Users/|\\Users\\))([^/\\\s'\":;,)\]}>|]+)")
_NAMES_OF_USERS: Final = re.compile(
    r"\b((?:USER|LOGNAME|USERNAME|SUDO_USER)=)([A-Za-z_][\w.-]{1,31})"
)
_REPEATED_BODY: Final = re.compile(
    r"((?:^|[\s.])(?:RequestValidationError|HTTPException|BadRequestError|JSONDecodeError"
    r"|TemplateError|UndefinedError|TemplateSyntaxError|UnprocessableEntityError): ).+"
)
# Names that say nothing of a person, and words that are more than a name.
_EVERYBODYS: Final = frozenset({
    "root", "user", "users", "admin", "ubuntu", "debian", "centos", "rocky", "fedora",
    "ec2-user", "azureuser", "opc", "vllm", "sglang", "model", "models", "ray", "app", "data",
    "nobody", "daemon", "home", "shared", "public", "runner", "docker", "nvidia", "python",
    "llm", "inference", "server", "service", "worker", "engine", "api", "gpu", "cuda", "test",
    "default", "none", "true", "false", "work", "workspace", "dev", "prod", "deploy", "memory",
    "cache", "torch", "kernel", "error", "batch", "max", "min", "token", "tokens", "block",
    "blocks", "code", "main", "local", "system", "host", "node", "rank", "process", "loader",
    "load", "build", "base", "jovyan",
})  # fmt: skip
_SHORTEST: Final = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Privacy:
    """What is taken out besides keys and tokens, as ``[privacy]`` of the configuration says."""

    prompts: bool = True
    user_names: bool = True
    home_paths: bool = True
    host_names: bool = False

    @property
    def redacts(self) -> bool:
        """Whether everything that a recording promises by ``redacted`` is taken out."""
        return self.prompts and self.user_names and self.home_paths


NOTHING: Final = Privacy(prompts=False, user_names=False, home_paths=False)
"""What is left of it where somebody asks for everything: keys and tokens are taken out."""


class _Names:
    """Words that stand for names, by the order in which those were met."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._known: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def alias(self, name: str) -> str:
        """The word for a name, always the same."""
        return self._known.setdefault(name, f"{self._word}{len(self._known) + 1}")

    def learn(self, name: str) -> None:
        """Replace this name from now on."""
        if name not in self._known:
            self.alias(name)
            self._pattern = None

    def replace(self, text: str) -> str:
        """The text with every known name in it replaced; names are told at their ends."""
        names = [name for name in self._known if _is_own(name)]
        if not names:
            return text
        if self._pattern is None:
            each = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{each})(?![A-Za-z0-9])")
        return self._pattern.sub(lambda match: self._known[match[0]], text)


def _is_own(name: str) -> bool:
    return len(name) >= _SHORTEST and name.lower() not in _EVERYBODYS


class Redactor:
    """Redacts texts, commands and samples of one recording."""

    def __init__(
        self,
        privacy: Privacy | None = None,
        *,
        users: Iterable[str] = (),
        hosts: Iterable[str] = (),
    ) -> None:
        """`users` and `hosts` are names to replace from the start; more are learned on the way."""
        self.privacy = privacy or Privacy()
        self._users, self._hosts = _Names("user"), _Names("host")
        if self.privacy.user_names or self.privacy.home_paths:
            for name in filter(_is_own, users):
                self._users.learn(name)
        if self.privacy.host_names:
            for name in hosts:
                self._hosts.learn(name)

    def text(self, text: str) -> str:
        """A text of any kind without secrets and names."""
        text = hide_text(text)
        if self.privacy.prompts:
            text = without_input_values(text)
        if self.privacy.home_paths:
            text = _HOME.sub(self._home, text)
        if self.privacy.user_names:
            text = _NAMES_OF_USERS.sub(self._named, text)
            text = self._users.replace(text)
        return self._hosts.replace(text)

    def words(self, words: Sequence[str]) -> list[str]:
        """A command."""
        return [self.text(word) for word in hide_words(words)]

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Variables of an environment."""
        return {
            name: self.text(str(value))
            for name, value in hide_values(values).items()
            if not (self.privacy.user_names and name in {"USER", "LOGNAME", "USERNAME", "HOME"})
        }

    def value(self, value: Any) -> Any:
        """Any value of a sample or a manifest: the texts in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): HIDDEN
                if each and not isinstance(each, int | float) and is_secret(str(key))
                else self.value(each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def name(self, name: str) -> str:
        """A name of a file: what is redacted in texts, and nothing a path could be made of."""
        kept = re.sub(r"[^A-Za-z0-9._-]", "_", self.text(name)).strip(".")
        return kept[:100] or "log"

    def _home(self, match: re.Match[str]) -> str:
        name = match[2]
        self._users.learn(name)
        return match[1] + self._users.alias(name)

    def _named(self, match: re.Match[str]) -> str:
        if not _is_own(match[2]):
            return match[0]
        self._users.learn(match[2])
        return match[1] + self._users.alias(match[2])


class LogRedactor:
    """Redacts the lines of one log in order: a request may go on over several lines."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._open = 0
        """How many lines a request that has not ended may still go on for."""

    def line(self, line: LogLine) -> str:
        """The text of a line, without its prefix."""
        if not self._redactor.privacy.prompts:
            return self._redactor.text(line.text)
        if is_client_text(line):
            self._open = _MAX_OPEN_LINES if _goes_on(line.text) else 0
            return self._redactor.text(client_head(line.text)) + REDACTED
        if self._open and not _begins(line):
            self._open -= 1
            return REDACTED
        self._open = 0
        text = _REPEATED_BODY.sub(rf"\1{REDACTED}", line.text)
        if text != line.text and _goes_on(line.text):
            self._open = _MAX_OPEN_LINES
        return self._redactor.text(text)


def _begins(line: LogLine) -> bool:
    """Whether a record begins here; vLLM puts its process before every line of one."""
    return (
        line.level is not None
        or line.origin is not None
        or (line.prefixed and line.process is None)
    )


def _goes_on(text: str) -> bool:
    """Whether a quotation or a bracket is still open at the end, as far as can be told."""
    quote, depth, escaped = "", 0, False
    for sign in text:
        if escaped:
            escaped = False
        elif sign == "\\":
            escaped = True
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
    return bool(quote) or depth > 0
