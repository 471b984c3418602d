"""Hostile texts of logs, from the stored incident to what each receiver is sent."""

from __future__ import annotations

import contextlib
import dataclasses
import email
import email.policy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from notice_samples import KINDS
from slack_sdk.models.blocks import Block

import oomwatch
from oomwatch.config.sinks import EmailConfig
from oomwatch.notify.message import incident_notice
from oomwatch.notify.notice import Notice
from oomwatch.notify.sinks import make_sink, pagerduty
from oomwatch.notify.sinks.alertmanager_webhook import envelope
from oomwatch.notify.sinks.slack_blocks import slack_payload
from oomwatch.notify.sinks.webhook import make_body
from oomwatch.notify.text import fit, subject
from oomwatch.records import Evidence

with contextlib.ExitStack() as stack:  # the samples of the folder above
    sys.path.insert(0, str(Path(__file__).parent.parent))
    stack.callback(sys.path.pop, 0)
    from incident_samples import AT, failure, stored

SERVER_LOG = Path(oomwatch.__file__).parent / "demo" / "recording" / "logs" / "server.log"
KEY = "sk-" + "K3y" * 10
PROMPT = "grandmother's recipe"
PIECES = (
    "<!channel>", "<!here|here>", "<@U012AB>", "<!subteam^S1|ops>", " @here ", " @channel", " @all ",
    '<at user_id="all">x</at>', "http://evil.example/x", "<http://evil.example|click>",
    "[click](javascript:alert(1))", "evil.example/path", "www.evil.example", "\u202etxt.exe",
    "\x1b[2J\x1b[31m", "\x00\x07\u2028\ud800", "</pre><script>alert(1)</script>", "&lt;&amp;", "```", "`",
    "*bold* _it_ ~st~", f" --api-key {KEY} ", f" Authorization: Bearer {KEY}", f" prompt='{PROMPT}'",
    f' {{"messages": [{{"role": "user", "content": "{PROMPT}"}}]}}', "x" * 5000, "显存不足" * 400, " ",
    "{0} {cause} %s",
)  # fmt: skip
CALLS = re.compile(
    r"<!(?:channel|here|everyone|subteam)|<@U|@(?:here|channel|everyone|all)\b|<at\b|javascript:|"
    r"https?://evil|www\.evil",
    re.IGNORECASE,
)
FILES = re.compile(  # what Slack takes for no domain; whole names only
    r"(?<![A-Za-z0-9_.-])[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.(?:log|py|json|txt|[A-Z]\w*Error)"
    r"(?![A-Za-z0-9_-]|\.[A-Za-z0-9_-])"
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=8).map("".join)
MAIL = make_sink(
    EmailConfig(
        name="m", server="localhost", security="none", sender="a@b.c", recipients=("d@e.f",)
    )
)


def hostile(text: str):
    """An incident in which everything that comes from outside is the text."""
    diagnosis = failure(
        summary=text,
        evidence=(
            Evidence("log", text, AT, text),
            Evidence("log", "server.log:1", AT, f"Received request r1: prompt: '{PROMPT}' {text}"),
            Evidence("kernel", "kernel log", AT, text, text),
        ),
    )
    engine = dataclasses.replace(diagnosis.engines[0], model=text, version=text)
    diagnosis = dataclasses.replace(diagnosis, engines=(engine,))
    return stored(diagnosis=diagnosis, text=text, host=f"gpu-07 {text}")


def messages(text: str):
    for lang in ("en", "zh"):
        told = incident_notice(
            hostile(text), labels={}, runbook_base="https://r.example", lang=lang
        )
        early = incident_notice(
            dataclasses.replace(hostile(text), diagnosis=None),
            labels={},
            runbook_base="",
            lang=lang,
        )
        for kind in KINDS:
            shown = (told, early, told) if kind == "grouped" else (told,)
            yield Notice(f"msg_{kind}", kind, AT, shown), lang


def check_slack(notice: Notice, lang) -> str:
    payload = slack_payload(notice, lang, whole=True)
    for block in Block.parse_all(payload["blocks"]):
        block.validate_json()
    assert len(payload["blocks"]) <= 50
    assert len(json.dumps(payload, ensure_ascii=False)) <= 12_000
    # Of the markup beside the blocks nothing is left that Slack would make a call or a link of.
    markup = payload["text"]
    assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", markup)
    prose = re.sub(r"`[^`\n]*`", "", markup)
    prose = FILES.sub("", prose)
    assert not re.search(r"@\w|(?<=[A-Za-z0-9])\.[A-Za-z]{2}|[a-z]://", prose)
    types = {
        one["type"]
        for block in payload["blocks"][1:]
        for element in block["elements"]
        for one in element["elements"]
    }
    assert types <= {"text", "link"}
    links = re.findall(r'"url": "([^"]*)"', json.dumps(payload))
    assert all(link.startswith("https://r.example/") for link in links)
    return json.dumps(payload, ensure_ascii=False)


def check_mail(notice: Notice) -> str:
    mail = MAIL._mail(notice, None)
    parsed = email.message_from_bytes(mail.as_bytes(), policy=email.policy.default)
    page = parsed.get_body(("html",)).get_content()
    assert not re.search(r"<(?!/?(?:html|body|h3|pre|b|br|a|!DOCTYPE)\b)", page)
    assert re.findall(r'href="([^"]*)"', page) == [
        one.runbook_url for one in notice.incidents if one.runbook_url and f'href="{one.runbook_url}"' in page
    ][: page.count("href=")]  # fmt: skip
    return parsed.get_body(("plain",)).get_content() + page + parsed["Subject"]


def sent(notice: Notice, lang):
    """What every receiver is sent, as text."""
    yield check_slack(notice, lang)
    yield check_mail(notice)
    yield f"{subject(notice, lang)}\n{fit(notice, lang, 2048)}"
    yield make_body(notice).decode()
    yield json.dumps(envelope(notice, "hook"), ensure_ascii=False)
    yield json.dumps(list(pagerduty.events(notice)), ensure_ascii=False)


def check(text: str) -> None:
    for notice, lang in messages(text):
        check_bodies(notice, lang)


def check_bodies(notice: Notice, lang) -> None:
    for body in sent(notice, lang):
        assert not CALLS.search(body)
        assert KEY not in body
        assert PROMPT not in body
        assert not {c for c in body if c not in "\n\r\u200b" and not c.isprintable()}
        assert "gpu-07" in body or notice.kind in {"test", "undelivered"}


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: ascii(piece)[:20])
def test_known_attacks(piece):
    check(f"before {piece} after")


def test_a_line_of_a_megabyte():
    check(f"begin {KEY} " + "\u202e<!channel>x" * 100_000)


def test_a_real_log_with_hostile_lines(tmp_path):
    """From the file, by the real command, to what is sent."""
    log = tmp_path / "server.log"
    lines = SERVER_LOG.read_text(encoding="utf-8").split("\n")
    [place] = [n for n, line in enumerate(lines) if "OutOfMemoryError: CUDA out of memory" in line]
    attack = "".join(piece for piece in PIECES if len(piece) < 200).replace("\ud800", "")
    head = lines[place].partition("torch.")[0]
    lines[place] += f" {attack}"
    lines[place:place] = [
        f"{head}Received request chatcmpl-1: prompt: '{PROMPT} <!channel>', params: none",
        f"{head}{attack}",
        "<!channel>" * 100_000,
    ]
    log.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "oomwatch", "diagnose", "--json", "--log", str(log)],
        capture_output=True,
        check=False,
    )
    diagnosis = json.loads(done.stdout)
    assert diagnosis["verdict"] == "oom"
    incident = dataclasses.replace(stored(host="gpu-07"), diagnosis=diagnosis)
    told = incident_notice(incident, labels={}, runbook_base="https://r.example")
    assert told.cause == "prefill_activation_peak"
    assert any("CUDA out of memory" in line for line in told.evidence)
    for kind in KINDS:
        check_bodies(Notice(f"msg_{kind}", kind, AT, (told,)), "en")


def test_a_key_beside_a_prompt():
    """Several keys may follow the option: what hides them takes the first words of the request."""
    check(f'--api-key {KEY}  {{"messages": [{{"role": "user", "content": "{PROMPT}"}}]}}')


@given(TEXTS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_mixture(text):
    check(text)
