"""A channel in Slack, by an incoming webhook or by a bot.

A webhook can only add messages. A bot opens a thread for each incident: what is said later goes
into the thread, and the first message is kept up to date, so that the channel shows how it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import SlackConfig
from oomwatch.notify.data import compact
from oomwatch.notify.http import Answer, HttpClient, outcome, retry_after_seconds
from oomwatch.notify.notice import Notice
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused
from oomwatch.notify.quoting import quoted
from oomwatch.notify.sinks.base import BaseSink
from oomwatch.notify.sinks.slack_blocks import shown, slack_payload

_JSON: Final = {"Content-Type": "application/json; charset=utf-8"}
_BAD_BLOCKS: Final = frozenset(
    {"invalid_blocks", "invalid_blocks_format", "msg_too_long", "msg_blocks_too_long"}
)
_PASSING: Final = frozenset(
    {
        "ratelimited", "rate_limited", "internal_error", "fatal_error", "request_timeout",
        "service_unavailable", "team_added_to_org", "accesslimited", "message_limit_exceeded",
        "rollup_error",
    }
)  # fmt: skip
_NO_JSON: Final = "no_json"
_ADVICE: Final[Mapping[str, str]] = {
    "not_in_channel": "invite the bot to the channel",
    "channel_not_found": "check the channel's id, and invite the bot to it",
    "missing_scope": "give the app the scope chat:write",
    "is_archived": "the channel is archived",
    "invalid_auth": "the token is not valid",
    "token_revoked": "the token was revoked",
    "token_expired": "the token has expired",
    "account_inactive": "the bot was removed",
}


def make(config: SlackConfig, environ: Mapping[str, str]) -> SlackWebhook | SlackBot:
    """Raises `ConfigError` if neither a webhook's URL nor a token is there."""
    if config.token_file is not None or (config.channel is not None and config.url_file is None):
        return SlackBot(config, environ)
    return SlackWebhook(config, environ)


class SlackWebhook(BaseSink):
    """An incoming webhook of Slack, or of a program that copies them."""

    kind = "slack"
    groups = True
    per_second = 1.0

    def __init__(self, config: SlackConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._client = HttpClient(config)
        self._credentials.url()

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        url, payload = self._credentials.url(), slack_payload(notice, self.lang)
        answer = self._client.post(url, compact(payload), _JSON)
        if isinstance(answer, Answer) and _word(answer) in _BAD_BLOCKS:
            answer = self._client.post(url, compact({"text": payload["text"]}), _JSON)
        said = outcome(answer, (url,))
        if isinstance(answer, Answer) and isinstance(said, Delivered) and not _is_taken(answer):
            return Refused(_without_ok(answer, url))
        return said

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """What the channel shows."""
        return shown(slack_payload(notice, self.lang))


class SlackBot(BaseSink):
    """A bot that writes with its token. A thread is named ``CHANNEL/TIMESTAMP``."""

    kind = "slack"
    groups = True
    per_second = 0.8

    def __init__(self, config: SlackConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        if config.channel is None:
            raise ConfigError([f"receiver {self.name} has no channel: a bot must know where"])
        self._channel = config.channel
        self._api_url = config.api_url.rstrip("/")
        self._client = HttpClient(config)
        self._credentials.get("token")

    def _send(self, notice: Notice, thread: str | None) -> Outcome:
        payload = slack_payload(notice, self.lang)
        channel, _, first = (thread or "").rpartition("/")
        if not (channel and first):
            return self._call("chat.postMessage", {"channel": self._channel, **payload})
        if notice.kind in {"updated", "resolved"}:
            kept = slack_payload(notice, self.lang, whole=True)
            done = self._call("chat.update", {"channel": channel, "ts": first, **kept})
            if isinstance(done, Later):
                return done
        reply = {"channel": channel, "thread_ts": first, **payload}
        if notice.kind == "escalated":
            reply["reply_broadcast"] = True
        done = self._call("chat.postMessage", reply)
        return Delivered(thread) if isinstance(done, Delivered) else done

    def _call(self, method: str, payload: Mapping[str, Any]) -> Outcome:
        answer = self._post(method, payload)
        if isinstance(answer, Answer) and _error(answer) in _BAD_BLOCKS:
            plain = {key: value for key, value in payload.items() if key != "blocks"}
            answer = self._post(method, plain)
        token = self._credentials.get("token")
        if isinstance(answer, Later) or not 200 <= answer.status < 300:
            return outcome(answer, (token,))
        error, told = _error(answer), _object(answer)
        if error is None:
            return Delivered(f"{told.get('channel', '')}/{told.get('ts', '')}")
        reason = f"{answer.place} {method}: {error}"
        if error == _NO_JSON:
            return Later(f"{answer.place} does not answer like Slack; is a log-in in between?")
        if error in _PASSING:
            return Later(reason, retry_after_seconds(answer.headers))
        if advice := _ADVICE.get(error):
            reason += f": {advice}"
        return Refused(reason)

    def _post(self, method: str, payload: Mapping[str, Any]) -> Answer | Later:
        headers = {**_JSON, "Authorization": f"Bearer {self._credentials.get('token')}"}
        return self._client.post(f"{self._api_url}/{method}", compact(payload), headers)

    def preview(self, notice: Notice, thread: str | None) -> str:
        """What the channel or the thread shows."""
        answers = thread is not None and notice.kind in {"updated", "resolved", "escalated"}
        where = f"in the thread of {self._channel}" if answers else f"in {self._channel}"
        kept = answers and notice.kind != "escalated"
        also = ", and the first message is changed" if kept else ""
        return f"({where}{also})\n\n{shown(slack_payload(notice, self.lang))}"


def _word(answer: Answer) -> str:
    """What a webhook answers: ``ok``, ``invalid_blocks``, …"""  # noqa: D400, D415 - an ellipsis
    return answer.body[:100].decode("ascii", "replace").strip()


def _is_taken(answer: Answer) -> bool:
    """Whether a webhook says so: ``ok`` or nothing, or as programs that copy Slack's do."""
    told = _object(answer)
    taken = told.get("ok") is True or told.get("success") is True or told.get("result") == "success"
    return taken or _word(answer).lower() in {"", "ok"}


def _without_ok(answer: Answer, url: str) -> str:
    said = quoted(answer.body, (url,))
    return f"{answer.place} answered {answer.status}, but not ok" + (f" ({said})" if said else "")


def _object(answer: Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error(answer: Answer) -> str | None:
    """The error that the API names; None for none."""
    told = _object(answer)
    if told.get("ok") is True:
        return None
    error = told.get("error")
    is_word = isinstance(error, str) and error.replace("_", "").isalnum() and len(error) < 60
    return str(error) if is_word else _NO_JSON
