"""A receiver of webhooks on loopback that fails as it is told to, and keeps all that came."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNk"  # noqa: S105 - of tests


class FaultyReceiver:
    """`fault` says before each answer what goes wrong: a status, "hang", "lost" (taken, but the
    answer does not arrive), or None.
    """

    def __init__(self, fault: Callable[[], int | str | None] = lambda: None) -> None:
        self.fault = fault
        self.attempts: list[tuple[str, dict[str, Any]]] = []
        """Each request: id and body."""
        self.taken: list[tuple[str, dict[str, Any], float]] = []
        """What it has taken, in order, each time it has: id, body and when."""
        self.retry_after: str | None = None
        self._ending = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with contextlib.suppress(OSError):
                    receiver.answer(self, self.headers.get("webhook-id") or "", body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, identity: str, body: dict[str, Any]) -> None:
        self.attempts.append((identity, body))
        fault = self.fault()
        if fault in {None, "lost"}:
            self.taken.append((identity, body, time.time()))
        if isinstance(fault, str):
            self._ending.wait(30 if fault == "hang" else 0)
            return
        handler.send_response(200 if fault is None else fault)
        if fault == 429 and self.retry_after is not None:
            handler.send_header("Retry-After", self.retry_after)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def ids(self) -> list[str]:
        """What it has taken, once each, in order."""
        return list(dict.fromkeys(identity for identity, _, _ in self.taken))

    def of(self, incident_id: str) -> list[str]:
        """The kinds of messages about an incident, in the order in which they came first."""
        seen: dict[str, str] = {}
        for identity, body, _ in self.taken:
            if any(each["id"] == incident_id for each in body["data"]["incidents"]):
                seen.setdefault(identity, body["data"]["kind"])
        return list(seen.values())

    def close(self) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()


def by_chance(seed: int, faults: tuple[int | str, ...]) -> Callable[[], int | str | None]:
    """Half of the time one of these faults."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    return lambda: chance.choice(faults) if chance.random() < 0.5 else None
