"""What went wrong with a connection, told by kinds of errors: their own texts hold addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import Any


def trouble(error: BaseException) -> str:
    """Why there was no answer, whatever failed."""
    import ssl  # noqa: PLC0415 - only where something went wrong

    if any(type(cause).__name__ == "ProxyError" for cause in _causes(error)):
        return f"the proxy {proxy_trouble(error)}"
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
        return tls_trouble(error)
    return connection_trouble(error)


def timed_out(error: BaseException) -> bool:
    """Whether a time-out is behind an error, which smtplib hides in one of its own."""
    return any(isinstance(cause, TimeoutError) for cause in _causes(error))


def tls_trouble(error: BaseException) -> str:
    """Why no TLS connection came about."""
    import ssl  # noqa: PLC0415 - loaded already

    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message.rstrip(".")
            return (
                f"its certificate is not trusted ({why}); if an internal authority signed it, "
                "name that in ca_file"
            )
    return "the TLS connection failed; is this an https address?"


def proxy_trouble(error: BaseException) -> str:
    """Why a proxy did not help, as the rest of a sentence about it."""
    status = re.search(r"Tunnel connection failed: (\d{3})", str(error))
    if status is not None:
        return f"refused the connection with {status[1]}"
    return f"cannot be used: {connection_trouble(error)}"


def connection_trouble(error: BaseException) -> str:
    """Why there is no connection."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "the name cannot be resolved"
        if isinstance(cause, ConnectionRefusedError):
            return "the connection was refused; is the receiver running?"
        if isinstance(cause, TimeoutError):
            return "cannot be reached within the time"
        if isinstance(cause, OSError) and cause.errno is not None and cause.strerror:
            return cause.strerror.lower()
    return "the connection was closed early"


def _causes(error: BaseException) -> Iterable[BaseException]:
    """The error, what it was raised from, and the errors that it carries."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]
