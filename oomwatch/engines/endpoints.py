"""Where an engine publishes its metrics, from its flags and from the sockets that it listens on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

_DEFAULT_PORTS: Final[Mapping[str, int]] = {
    "vllm": 8000,
    "sglang": 30000,
    "tgi": 3000,
    "lmdeploy": 23333,
    "llama.cpp": 8080,
    "ollama": 11434,
}
_METRICS_FLAGS: Final = {"sglang": "--enable-metrics", "llama.cpp": "--metrics"}
_NO_METRICS: Final = {"ollama": "Ollama has no metrics page"}
_ANY: Final = frozenset({"0.0.0.0", "::", "127.0.0.1"})  # noqa: S104 - compared, not bound


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """An address on this host; `host` is None without one, then `reason` says why.

    With an address, `reason` says what is uncertain or wrong about it.
    """

    scheme: str = "http"
    host: str | None = None
    port: int | None = None
    reason: str | None = None

    def url(self, *, address: str | None = None) -> str | None:
        """The metrics page; `address` replaces the host, for a server in another namespace."""
        host = address or self.host
        return None if self.host is None else f"{self.scheme}://{host}:{self.port}/metrics"


def metrics_endpoint(
    engine: str,
    arguments: Mapping[str, Any] | None,
    listening: Sequence[tuple[str, int]],
) -> Endpoint:
    """The metrics of a server with these flags (None: not known) and listening sockets."""
    given = arguments or {}
    port = _port(engine, given) if arguments is not None else None
    if engine in _NO_METRICS:
        return Endpoint(port=port, reason=_NO_METRICS[engine])
    if "--uds" in given:
        return Endpoint(reason="it listens on a Unix socket only")
    if given.get("--headless") is True:
        return Endpoint(reason="it was started headless; the metrics are on its first node")
    flag = _METRICS_FLAGS.get(engine)
    if flag and given.get(flag) is not True:
        return Endpoint(port=port, reason=f"it was started without {flag}")
    found = _choose(listening, port)
    if found.host is None:
        return found
    scheme = "https" if "--ssl-keyfile" in given else "http"
    reason = found.reason
    if given.get("--disable-log-stats") is True:
        reason = "--disable-log-stats leaves its figures out"
    return dataclasses.replace(found, scheme=scheme, reason=reason)


def _port(engine: str, arguments: Mapping[str, Any]) -> int | None:
    given = str(arguments.get("--port", ""))
    return int(given) if given.isascii() and given.isdigit() else _DEFAULT_PORTS.get(engine)


def _choose(listening: Sequence[tuple[str, int]], port: int | None) -> Endpoint:
    """The socket on the server's port, or the only one there is."""
    on_port = [host for host, found in listening if found == port]
    if on_port:
        return Endpoint(host=_reachable(on_port[0]), port=port)
    ports = sorted({found for _, found in listening})
    if len(ports) == 1:
        return Endpoint(host=_reachable(listening[0][0]), port=ports[0])
    if port is None:
        names = ", ".join(map(str, ports[:8]))
        return Endpoint(
            reason=f"it listens on several ports: {names}"
            if ports
            else "it listens on no port that can be seen"
        )
    problem = "not among those that it listens on" if ports else "not seen to listen"
    return Endpoint(
        host="127.0.0.1", port=port, reason=f"port {port} is {problem} (still starting?)"
    )


def _reachable(host: str) -> str:
    """The address to ask from this host, of a socket that is bound to `host`."""
    if host in _ANY:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
