from __future__ import annotations

import dataclasses
import json
import platform
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_receiver import Reply
from notice_samples import FLAGS, INCIDENT, KINDS, notice
from slack_sdk.models.blocks import Block

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import SlackConfig
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink
from oomwatch.notify.sinks.slack_blocks import fallback_text, shown, slack_payload

TOKEN = "xoxb-0000-SECRET"  # noqa: S105 - a sample


def webhook(receiver, secret, **keys):
    url = f"{receiver.url}services/T0/B0/SECRET"
    return make_sink(SlackConfig(name="chan", url_file=secret(url), timeout_seconds=10.0, **keys))


def bot(receiver, secret, **keys):
    keys = {"token_file": secret(TOKEN), "channel": "C012", **keys}
    return make_sink(
        SlackConfig(name="bot", api_url=f"{receiver.url}api", timeout_seconds=10.0, **keys)
    )


def as_slack(got):
    """Slack's own answers to what a bot asks."""
    method, asked = got.path.rpartition("/")[2], got.json
    ts = asked.get("ts") or f"17{len(asked.get('thread_ts', '')):02}.000100"
    told = {"ok": True, "channel": asked["channel"], "ts": ts, "method": method}
    return Reply(200, json.dumps(told).encode())


def check(payload):
    """Slack's limits, by its own models and by what is known beside them."""
    blocks = Block.parse_all(payload["blocks"])
    assert len(blocks) == len(payload["blocks"]) <= 50
    for block in blocks:
        block.validate_json()
    assert len(payload["blocks"][0]["text"]["text"]) <= 150
    assert len(json.dumps(payload, ensure_ascii=False)) <= 12_000
    assert payload["text"]
    for block in payload["blocks"][1:]:
        assert block["elements"]
        for element in block["elements"]:
            assert element["elements"]
            assert all(one["text"] for one in element["elements"])


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_message_of_slack(kind, whole, lang):
    payload = slack_payload(notice(kind), lang, whole=whole)
    check(payload)
    for one in notice(kind).incidents:
        assert one.id in shown(payload)


def test_the_models_would_refuse_a_header_that_is_too_long():
    payload = slack_payload(notice("opened"), "en")
    payload["blocks"][0]["text"]["text"] = "x" * 151
    with pytest.raises(Exception, match="150"):
        check(payload)


def test_an_incident_is_told_with_cause_flags_memory_and_runbook(receiver, secret):
    assert webhook(receiver, secret).send(notice("opened"), None) == Delivered()
    [got] = receiver.got
    payload = got.json
    assert got.path == "/services/T0/B0/SECRET"
    assert payload["unfurl_links"] is False
    said = shown(payload)
    for part in (
        "[CRITICAL] A long prefill needed more activation memory than was left",
        "gpu-07.example.com · chat-70b · vLLM 0.11.0 · Qwen3-32B · GPU 0,1",
        "prefill_activation_peak, 83 % sure",
        "3.1 GiB asked",
        FLAGS,
        "Lower the share",
        "GPU 0 (79.2 GiB)",
        "torch.OutOfMemoryError",
        "inc-0123456789ab",
        "Runbook (https://runbooks.internal/prefill_activation_peak)",
    ):
        assert part in said
    assert f"`{FLAGS}`" in payload["text"]


def test_flags_stand_alone_to_be_copied():
    blocks = slack_payload(notice("opened"), "en")["blocks"]
    elements = [element for block in blocks[1:] for element in block["elements"]]
    commands = [e for e in elements if e["type"] == "rich_text_preformatted"]
    assert commands[0]["elements"] == [{"type": "text", "text": FLAGS}]


def test_a_group_lists_every_incident():
    many = [
        dataclasses.replace(INCIDENT, id=f"inc-{number:012x}", engine_id=f"engine-{number}")
        for number in range(60)
    ]
    payload = slack_payload(notice("grouped", *many), "en")
    check(payload)
    said = shown(payload)
    assert "60 incidents on gpu-07.example.com" in said
    for one in many:
        assert one.id in said


def test_very_many_incidents_are_counted():
    many = [dataclasses.replace(INCIDENT, id=f"inc-{number:012x}") for number in range(900)]
    payload = slack_payload(notice("grouped", *many), "en")
    check(payload)
    listed = shown(payload).count("- [CRITICAL]")
    assert listed > 50
    assert f"and {900 - listed} more: oomwatch incidents" in shown(payload)


def test_lines_of_logs_go_first_and_flags_never():
    wordy = dataclasses.replace(
        INCIDENT, evidence=tuple(f"{number}" + "x" * 299 for number in range(6)), why="y" * 9_000
    )
    said = shown(slack_payload(notice("opened", wordy), "en"))
    assert "xxx" not in said
    for part in (FLAGS, "83 % sure", INCIDENT.host, "prefill_activation_peak", INCIDENT.id):
        assert part in said


def test_flags_are_shown_as_they_are_and_call_nobody():
    flags = ("--served-model-name '<!channel> http://evil.example `x` & @here'", "--seed 1")
    remedy = dataclasses.replace(INCIDENT.remedies[0], flags=flags)
    payload = slack_payload(
        notice("opened", dataclasses.replace(INCIDENT, remedies=(remedy,))), "en"
    )
    check(payload)
    assert " ".join(flags) in shown(payload)
    assert not re.search(r"[<>]|@here|http://", payload["text"])


LENGTHS = st.integers(0, 20_000)


@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 300), st.sampled_from(KINDS), st.booleans())
@settings(max_examples=15, deadline=None)
def test_no_length_of_anything_breaks_the_limits(flags, words, lines, many, kind, whole):  # noqa: PLR0917
    """Whatever stands in the store: no message is refused for its size, or for being empty."""
    remedy = dataclasses.replace(INCIDENT.remedies[0], title='"' * words, flags=("f" * flags,))
    one = dataclasses.replace(
        INCIDENT,
        host="h" * (words // 10),
        headline="\\" * words,
        why="显" * words,
        memory="m" * words,
        evidence=("<" * lines,) * 6,
        remedies=(remedy,) * 3,
    )
    told = notice(kind, *([one] * many), note="n" * words)
    for lang in ("en", "zh"):
        check(slack_payload(told, lang, whole=whole))


def test_a_resolved_one_is_short():
    said = shown(slack_payload(notice("resolved"), "en"))
    assert said.startswith("[RESOLVED]")
    assert "It serves again, with other flags." in said
    assert "Lasted 11 min 40 s" in said
    assert FLAGS not in said


def test_what_slack_refuses_as_blocks_is_sent_as_text(receiver, secret):
    receiver.answer(Reply(400, b"invalid_blocks"), Reply())
    assert webhook(receiver, secret).send(notice("opened"), None) == Delivered()
    assert set(receiver.got[1].json) == {"text"}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(404, b"no_service"), Refused("{place} answered 404 (no_service)")),
        (
            Reply(410, b"channel_is_archived"),
            Refused("{place} answered 410 (channel_is_archived): this address is no longer in use", disable=True),
        ),
        (Reply(429, b"", {"Retry-After": "30"}), Later("{place} answered 429", 30.0)),
        (
            Reply(200, b"<html>Please log in</html>"),
            Later("{place} answered with a web page; is there a log-in in between?"),
        ),
        (Reply(200, b"invalid_payload"), Refused("{place} answered 200, but not ok (invalid_payload)")),
        (
            Reply(200, b'{"ok":false,"error":"no SECRET"}'),
            Refused('{place} answered 200, but not ok ({{"ok":false,"error":"no ***"}})'),
        ),
        (Reply(200, b""), Delivered()),
        (Reply(200, b"OK\n"), Delivered()),
        (Reply(200, b'{"success":true}'), Delivered()),
    ],
)  # fmt: skip
def test_what_a_webhook_answers(receiver, secret, reply, said):
    receiver.answer(reply)
    place = f"127.0.0.1:{receiver.port}"
    if not isinstance(said, Delivered):
        said = dataclasses.replace(said, reason=said.reason.format(place=place))
    assert webhook(receiver, secret).send(notice("opened"), None) == said


def test_a_bot_opens_a_thread_and_keeps_its_first_message_up_to_date(receiver, secret):
    receiver.answer(as_slack)
    sink = bot(receiver, secret)

    opened = sink.send(notice("opened"), None)
    assert opened == Delivered("C012/1700.000100")
    assert receiver.got[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert receiver.got[0].path == "/api/chat.postMessage"
    assert "thread_ts" not in receiver.got[0].json

    assert sink.send(notice("resolved"), opened.reference) == opened
    changed, answered = receiver.got[1:]
    assert changed.path == "/api/chat.update"
    assert (changed.json["channel"], changed.json["ts"]) == ("C012", "1700.000100")
    assert shown(changed.json).startswith("[RESOLVED]")
    assert FLAGS in shown(changed.json), "what it was can still be read in the channel"
    assert answered.path == "/api/chat.postMessage"
    assert answered.json["thread_ts"] == "1700.000100"
    assert FLAGS not in shown(answered.json)


def test_an_escalation_is_seen_in_the_channel_too(receiver, secret):
    receiver.answer(as_slack)
    sink = bot(receiver, secret)
    sink.send(notice("escalated"), "C012/1700.000100")
    [got] = receiver.got
    assert got.json["reply_broadcast"] is True
    assert shown(got.json).startswith("[CRITICAL, UNACKNOWLEDGED]")


def test_a_first_message_that_was_deleted_does_not_stop_the_answer(receiver, secret):
    receiver.answer(Reply(200, b'{"ok":false,"error":"message_not_found"}'), as_slack)
    told = bot(receiver, secret).send(notice("resolved"), "C012/1700.000100")
    assert isinstance(told, Delivered)
    assert receiver.got[1].json["thread_ts"] == "1700.000100"


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b'{"ok":false,"error":"not_in_channel"}', Refused, "invite the bot to the channel"),
        (b'{"ok":false,"error":"invalid_auth"}', Refused, "the token is not valid"),
        (b'{"ok":false,"error":"ratelimited"}', Later, "ratelimited"),
        (b'{"ok":false,"error":"<!channel> secret"}', Later, "does not answer like Slack"),
        (b"<html>", Later, "does not answer like Slack"),
        (b"[]", Later, "does not answer like Slack"),
    ],
)
def test_what_the_api_answers(receiver, secret, body, kind, says):
    receiver.answer(Reply(200, body, {"Retry-After": "3"}))
    told = bot(receiver, secret).send(notice("opened"), None)
    assert isinstance(told, kind)
    assert says in told.reason
    assert TOKEN not in told.reason
    if says == "ratelimited":
        assert told.after_seconds == 3


def test_what_is_missing_is_said(secret):
    with pytest.raises(ConfigError, match=r"has no url_file.*OOMWATCH_NOTIFY_X_URL"):
        make_sink(SlackConfig(name="x"), {})
    with pytest.raises(ConfigError, match=r"has no token_file.*OOMWATCH_NOTIFY_X_TOKEN"):
        make_sink(SlackConfig(name="x", channel="C1"), {})
    with pytest.raises(ConfigError, match="does not hold an http"):
        make_sink(SlackConfig(name="x", url_file=secret("hooks.slack.com/x")), {})


def test_preview_reads_like_the_channel(receiver, secret):
    said = bot(receiver, secret).preview(notice("resolved"), "C012/1.2")
    assert said.startswith("(in the thread of C012, and the first message is changed)")
    assert "[RESOLVED]" in webhook(receiver, secret).preview(notice("resolved"), None)
    assert not receiver.got


@pytest.mark.parametrize(("lang", "words"), [("en", "will be told"), ("zh", "通知到您")])
def test_a_test_says_from_where_it_is(lang, words):
    said = shown(slack_payload(notice("test", note=None), lang))
    assert words in said
    assert platform.node() in said


def test_chinese_words(receiver, secret):
    webhook(receiver, secret, lang="zh").send(notice("opened"), None)
    said = shown(receiver.got[0].json)
    for part in ("【严重】", "处理办法", "显存：", "证据", "处理手册", FLAGS):
        assert part in said


@pytest.mark.parametrize(
    ("line", "links"),
    [
        ("server.log:812: torch.OutOfMemoryError: CUDA out of memory", 0),
        ("/var/log/vllm/worker.py, vllm.service, config.json", 0),
        ("gpu-07.example.com", 2),
        ("see evil.com/server.log", 1),
        ("server.log.evil.com", 3),
        ("http://a.log and x@y", 2),
        ("a sentence. Another one", 0),
    ],
)
def test_only_what_would_become_a_link_or_a_call_is_parted(line, links):
    """What is copied from a message into a shell must be what it looks like."""
    incident = dataclasses.replace(INCIDENT, why=line)
    (shown_line,) = (
        each
        for each in fallback_text(notice("opened", incident), "en").split("\n")
        if each.replace("\u200b", "") == line
    )
    assert shown_line.count("\u200b") == links


def test_the_command_that_shows_an_incident_is_there_to_be_copied():
    assert "· oomwatch incidents show inc-0123456789ab ·" in shown(
        slack_payload(notice("opened"), "en")
    )
