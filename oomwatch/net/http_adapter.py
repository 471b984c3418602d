"""How `requests` connects for one request: with our certificates, and under a deadline."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from requests.adapters import HTTPAdapter

if TYPE_CHECKING:
    import ssl

    from oomwatch.net.deadline import Deadline


class WatchedAdapter(HTTPAdapter):
    """Makes the connections of one request; `context` holds the certificates to trust."""

    def __init__(self, deadline: Deadline, context: ssl.SSLContext | None) -> None:
        self._deadline = deadline
        self._context = context
        super().__init__(max_retries=0)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Of connections without a proxy."""
        super().init_poolmanager(*args, **self._with_context(options))

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        """Of connections through one."""
        return super().proxy_manager_for(proxy, **self._with_context(options))

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        """A pool that gives every connection it makes to the deadline."""
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = _watched(pool.ConnectionCls, self._deadline)
        return pool

    def _with_context(self, options: dict[str, Any]) -> dict[str, Any]:
        return options if self._context is None else {**options, "ssl_context": self._context}


def _watched(kind: Any, deadline: Deadline) -> Any:
    def connect(self: Any) -> socket.socket:
        made: socket.socket = kind._new_conn(self)  # noqa: SLF001 - where urllib3 opens a socket
        deadline.watch(made)
        return made

    return type(kind.__name__, (kind,), {"_new_conn": connect})
