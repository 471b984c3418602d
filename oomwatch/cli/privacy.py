"""What is taken out of what leaves this host, by the configuration and the options of a command."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomwatch.sources.redaction import Redactor

_FIRST_PERSON: Final = 1000
"""User ids below are of the system's own accounts; those above 60000 of none."""
_LAST_PERSON: Final = 60_000


def make_redactor(*, redact: bool = True, hosts: Iterable[str] = ()) -> Redactor:
    """As ``[privacy]`` says; without `redact` only keys and tokens are taken out.

    Raises:
        ConfigError: the configuration is wrong.

    """
    from oomwatch.config import load_config
    from oomwatch.sources.redaction import NOTHING, Privacy, Redactor

    if not redact:
        return Redactor(NOTHING)
    settings = load_config().config.privacy
    privacy = Privacy(
        prompts=settings.redact_prompts,
        user_names=settings.redact_user_names,
        home_paths=settings.redact_home_paths,
        host_names=settings.redact_host_names,
    )
    own = socket.gethostname()
    names = {name for name in (own, own.partition(".")[0], *hosts) if name}
    return Redactor(privacy, users=_people(), hosts=sorted(names, key=len, reverse=True))


def _people() -> list[str]:
    """The names of the people who have an account here, and of who runs this."""
    found = [
        entry.pw_name for entry in pwd.getpwall() if _FIRST_PERSON <= entry.pw_uid <= _LAST_PERSON
    ]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.getuid()).pw_name)
    return found + [os.environ[name] for name in ("SUDO_USER", "LOGNAME") if os.environ.get(name)]
