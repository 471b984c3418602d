"""What is served: the metrics, whether the agent is well and ready, and the pages of the causes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Final

from oomwatch.export.page import Form
from oomwatch.export.request import Request
from oomwatch.export.text import CONTENT_TYPES, preferred

MakePage = Callable[[Form, str], bytes | None]
"""The page in a form, for whoever asks; None before the first reading."""

_PLAIN: Final = "text/plain; charset=utf-8"
_RETRY_SECONDS: Final = 2
_INDEX: Final = """\
oomwatch: what ran out of memory on an LLM server, and why

/metrics          figures for Prometheus
/-/healthy        200 while the agent runs
/-/ready          200 once it has figures
/runbooks/CAUSE   what a cause is and what to do, such as /runbooks/kv_saturation
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    status: int
    body: bytes = b""
    content_type: str = _PLAIN
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Site:
    """Answers requests for paths."""

    def __init__(
        self,
        make_page: MakePage,
        is_ready: Callable[[], bool],
        runbook: Callable[[str], str | None],
    ) -> None:
        """`runbook` gives the page of a cause; None for one that there is not."""
        self._make_page = make_page
        self._is_ready = is_ready
        self._runbook = runbook

    def answer(self, request: Request) -> Answer:
        """The answer to a request that was let in."""
        if request.method not in {"GET", "HEAD"}:
            return plain(405, "only GET and HEAD are answered", {"Allow": "GET, HEAD"})
        if request.path == "/metrics":
            return self._metrics(request)
        if request.path == "/-/healthy":
            return plain(200, "healthy")
        if request.path == "/-/ready":
            return plain(200, "ready") if self._is_ready() else _not_yet()
        if request.path == "/":
            return plain(200, _INDEX.rstrip())
        if request.path.startswith("/runbooks/"):
            page = self._runbook(request.path.removeprefix("/runbooks/").removesuffix(".md"))
            if page is not None:
                return Answer(200, page.encode())
        return plain(404, "there is no such page; / lists those that there are")

    def _metrics(self, request: Request) -> Answer:
        packed = takes_gzip(request.header("accept-encoding"))
        form = Form(preferred(request.header("accept")), packed)
        body = self._make_page(form, request.client)
        if body is None:
            return _not_yet()
        headers = {"Vary": "Accept, Accept-Encoding"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        return Answer(200, body, CONTENT_TYPES[form.format], headers)


def plain(status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
    """A sentence for people."""
    return Answer(status, f"{text}\n".encode(), headers=headers or {})


def takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header asks for gzip."""
    for entry in accept_encoding.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() in {"gzip", "*"}:
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


def _not_yet() -> Answer:
    return plain(503, "not ready: nothing was read yet", {"Retry-After": str(_RETRY_SECONDS)})
