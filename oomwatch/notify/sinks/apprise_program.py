"""The program that sends one message by Apprise: a request on its standard input, JSON back.

    {"addresses": {"1": "dingtalk://…"}, "notice": {…}, "lang": "zh", "timeout_seconds": 20, …}
    {"1": {"taken": false, "service": "dingtalk", "later": true, "reason": "…"}}

Apprise tells no more than whether it went well, and takes a refusal of DingTalk or WeCom, which
answer 200 to everything, for that. So all that `requests` does here is watched; this process does
nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import apprise
import requests

from oomwatch.net.deadline import Deadline
from oomwatch.net.http_adapter import WatchedAdapter
from oomwatch.notify import text
from oomwatch.notify.http import is_web_page, retry_after_seconds
from oomwatch.notify.notice import Notice, notice_from_json
from oomwatch.notify.tls import trust
from oomwatch.notify.trouble import trouble
from oomwatch.report.locale import Language

_CODE_KEYS: Final[Mapping[str, str]] = {
    "oapi.dingtalk.com": "errcode",
    "qyapi.weixin.qq.com": "errcode",
    "open.feishu.cn": "code",
    "open.larksuite.com": "code",
}
"""Services that answer 200 in any case, with the key of the answer that says what came of it."""
_BUSY: Final = frozenset({-1, 130101, 410100, 45009, 11232, 11233, 99991400})
"""Their codes for: too many messages, or too much to do."""
_ADVICE: Final[Mapping[int, str]] = {
    310000: "check the robot's security settings: keyword (use oomwatch), signature, addresses",
    300001: "the access token is not valid",
    19021: "the signature is not valid, or the clock is wrong",
    19022: "this host's address is not allowed",
    19024: "the message lacks the robot's keyword: use oomwatch",
    93000: "the key of the robot is not valid",
}
_KINDS: Final = {
    "critical": "failure",
    "warning": "warning",
    "info": "info",
    "resolved": "success",
}


@dataclasses.dataclass(slots=True)
class Seen:
    """What came of the requests of one address; the worst of them counts."""

    reason: str | None = None
    later: bool = False
    after_seconds: float | None = None

    def note(self, reason: str, *, later: bool, after_seconds: float | None = None) -> None:
        """Something went wrong."""
        self.reason, self.later, self.after_seconds = reason, later, after_seconds


def main() -> None:
    """Read the request, send, write what came of it."""
    asked = json.load(sys.stdin)
    logging.disable()  # what Apprise logs holds addresses
    notice, lang = notice_from_json(asked["notice"]), asked["lang"]
    answers = {
        number: _tell(address, notice, lang, asked)
        for number, address in asked["addresses"].items()
    }
    json.dump(answers, sys.stdout)


def _tell(address: str, notice: Notice, lang: Language, asked: Mapping[str, Any]) -> dict[str, Any]:
    asset = apprise.AppriseAsset(app_id="oomwatch", app_desc="oomwatch", async_mode=False)
    service = address.partition("://")[0].lower()
    plugin = apprise.Apprise.instantiate(address, asset=asset, suppress_exceptions=True)
    if plugin is None:
        reason = "Apprise does not understand it"
        return {"taken": False, "service": service, "later": False, "reason": reason}
    seen = Seen()
    with Deadline(asked["timeout_seconds"]) as deadline:
        _watch(seen, deadline, asked)
        title = text.subject(notice, lang)
        room = max(200, plugin.body_maxlen - len(title.encode()) - 8)
        body = text.fit(notice, lang, room, lambda one: len(one.encode()))
        sender = apprise.Apprise(asset=asset)
        sender.add(plugin)
        taken = sender.notify(
            title=title,
            body=body,
            notify_type=_kind(notice),
            body_format=apprise.NotifyFormat.TEXT,
        )
    if taken and seen.reason is None:
        return {"taken": True}
    if seen.reason is None:
        seen.note("Apprise could not send it", later=True)
    return {"taken": False, "service": service, **dataclasses.asdict(seen)}


def _kind(notice: Notice) -> str:
    if notice.kind == "undelivered":
        return "warning"
    return _KINDS["resolved" if notice.kind == "resolved" else text.worst(notice)]


def _watch(seen: Seen, deadline: Deadline, asked: Mapping[str, Any]) -> None:
    """Let every request of this process obey us, and note what came of it."""
    context = trust(asked["ca_file"], "ca_file")
    request: Callable[..., requests.Response] = getattr(
        requests.Session, "_unwatched", requests.Session.request
    )

    def watched(
        self: requests.Session, method: str, url: str, *args: Any, **options: Any
    ) -> requests.Response:
        self.mount("http://", WatchedAdapter(deadline, None))
        self.mount("https://", WatchedAdapter(deadline, context))
        options |= {"allow_redirects": False, "timeout": asked["timeout_seconds"]}
        params = options.get("params")
        if isinstance(params, dict) and "sign" in params:
            # Apprise 2.3 encodes DingTalk's signature, which requests then does once more:
            # DingTalk answers that with 310000, "sign not match".
            options["params"] = {**params, "sign": unquote(str(params["sign"]))}
        try:
            answer = request(self, method, url, *args, **options)
        except (requests.exceptions.RequestException, OSError) as error:
            reason = "no whole answer within the time" if deadline.passed else trouble(error)
            seen.note(reason, later=True)
            raise
        _judge(seen, answer)
        return answer

    requests.Session._unwatched = request  # type: ignore[attr-defined] # noqa: SLF001 - kept there
    requests.Session.request = watched  # type: ignore[method-assign, assignment]


def _judge(seen: Seen, answer: requests.Response) -> None:
    status = answer.status_code
    if not 200 <= status < 300:
        later = status in {302, 303, 307, 408, 425, 429} or status >= 500
        headers = {name.lower(): value for name, value in answer.headers.items()}
        seen.note(f"answered {status}", later=later, after_seconds=retry_after_seconds(headers))
        return
    key = _CODE_KEYS.get(urlsplit(answer.url).hostname or "")
    if key is None:
        if is_web_page(answer.content):
            seen.note("answered with a web page; is there a log-in in between?", later=True)
        return
    try:
        told = answer.json()
        code = told.get(key, told.get("StatusCode", 0)) if isinstance(told, dict) else None
    except ValueError:
        code = None
    if not isinstance(code, int):
        seen.note("does not answer as it should; is a log-in in between?", later=True)
    elif code != 0:
        advice = f": {_ADVICE[code]}" if code in _ADVICE else ""
        seen.note(f"refused it with code {code}{advice}", later=code in _BUSY)


if __name__ == "__main__":
    main()
