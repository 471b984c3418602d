"""The Chinese services' real payloads, taken by a proxy that plays the services under TLS.

Apprise has the services' hosts built in. So the sink's own `proxy` and `ca_file` lead it to a
receiver of ours: what arrives there is what DingTalk, Feishu, Lark and WeCom would get.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import urllib.parse

import pytest
from loopback_receiver import RawReceiver, Receiver, Reply, hang
from notice_samples import FLAGS, INCIDENT, notice

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import AppriseConfig
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink

TOKEN = "a" * 64
DINGTALK = f"dingtalk://SECxyz@{TOKEN}"
FEISHU = "feishu://0123abcd-0123-4567-89ab-0123456789ab"
LARK = "lark://0123abcd-0123-4567-89ab-0123456789ab"
WECOM = "wecombot://0123abcd-0123-4567-89ab-0123456789ab"
DONE = b'{"errcode":0,"errmsg":"ok","code":0,"msg":"success"}'


@pytest.fixture(scope="module")
def shared_proxy(tls_context):
    server = Receiver(tls_context)
    yield server
    server.close()


@pytest.fixture
def services(shared_proxy):
    shared_proxy.clear()
    shared_proxy.answer(Reply(200, DONE, {"Content-Type": "application/json"}))
    return shared_proxy


@pytest.fixture
def sink_of(services, ca_file, secret):
    def make(*addresses, **keys):
        keys = {
            "proxy": services.url.rstrip("/"),
            "ca_file": ca_file,
            "timeout_seconds": 20.0,
            **keys,
        }
        config = AppriseConfig(name="im", urls_file=secret("\n".join(addresses)), **keys)
        return make_sink(config, {})

    return make


def content(got) -> str:
    """The text of a message, as each of the services has it."""
    body = got.json
    if "msg_type" in body:
        assert body["msg_type"] == "text"
        return body["content"]["text"]
    assert body["msgtype"] == "text"
    return body["text"]["content"]


@pytest.mark.parametrize(
    ("address", "host", "path"),
    [
        (DINGTALK, "oapi.dingtalk.com", "/robot/send"),
        (FEISHU, "open.feishu.cn", "/open-apis/bot/v2/hook/0123abcd"),
        (LARK, "open.larksuite.com", "/open-apis/bot/v2/hook/0123abcd"),
        (WECOM, "qyapi.weixin.qq.com", "/cgi-bin/webhook/send?key=0123abcd"),
    ],
)
def test_chinese_services_get_what_they_take(services, sink_of, address, host, path):
    assert sink_of(address, lang="zh").send(notice("opened"), None) == Delivered()
    [got] = services.got
    assert services.targets == [f"{host}:443"]
    assert got.path.startswith(path)
    said = content(got)
    assert said.startswith("【严重】")
    for part in (FLAGS, "prefill_activation_peak", "gpu-07.example.com", "置信度 83%", "oomwatch"):
        assert part in said


def test_dingtalk_is_signed(services, sink_of):
    sink_of(DINGTALK).send(notice("opened"), None)
    query = dict(urllib.parse.parse_qsl(services.got[0].path.partition("?")[2]))
    signed = f"{query['timestamp']}\nSECxyz".encode()
    digest = hmac.digest(b"SECxyz", signed, hashlib.sha256)
    assert query["sign"] == base64.b64encode(digest).decode()
    assert query["access_token"] == TOKEN


def test_wecom_gets_no_more_than_its_2048_bytes(services, sink_of):
    long = dataclasses.replace(INCIDENT, why="显" * 3000, evidence=("长" * 300,) * 6)
    sink_of(WECOM, lang="zh").send(notice("opened", long), None)
    said = content(services.got[0])
    assert len(said.encode()) <= 2048
    assert FLAGS in said
    assert "长" not in said


@pytest.mark.parametrize(
    ("address", "body", "kind", "says"),
    [
        (DINGTALK, b'{"errcode":310000,"errmsg":"keywords not in content"}', Refused, "keyword"),
        (DINGTALK, b'{"errcode":130101,"errmsg":"too fast"}', Later, "code 130101"),
        (WECOM, b'{"errcode":93000,"errmsg":"invalid webhook url"}', Refused, "key of the robot"),
        (WECOM, b'{"errcode":45009,"errmsg":"api freq out of limit"}', Later, "code 45009"),
        (FEISHU, b'{"code":19024,"msg":"Key Words Not Found"}', Refused, "use oomwatch"),
        (FEISHU, b'{"code":11232,"msg":"frequency limited"}', Later, "code 11232"),
        (LARK, b"<html>log in</html>", Later, "is a log-in in between"),
    ],
)
def test_a_refusal_with_status_200_is_seen(services, sink_of, address, body, kind, says):  # noqa: PLR0917
    services.answer(Reply(200, body, {"Content-Type": "application/json"}))
    said = sink_of(address).send(notice("opened"), None)
    assert isinstance(said, kind)
    assert says in said.reason
    assert said.reason.startswith(f"address 1 ({address.partition(':')[0]}): ")
    assert "0123abcd" not in said.reason
    assert TOKEN not in said.reason


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(429, b"", {"Retry-After": "9"}), Later("address 1 (feishu): answered 429", 9.0)),
        (Reply(503, b""), Later("address 1 (feishu): answered 503")),
        (Reply(404, b""), Refused("address 1 (feishu): answered 404")),
        (
            Reply(301, b"", {"Location": "https://qyapi.weixin.qq.com/"}),
            Refused("address 1 (feishu): answered 301"),
        ),
    ],
)
def test_what_a_status_means(services, sink_of, reply, said):
    services.answer(reply)
    assert sink_of(FEISHU).send(notice("opened"), None) == said
    assert len(services.targets) == 1, "a redirect is not followed"


def test_who_has_taken_it_is_not_told_again(services, sink_of):
    sink = sink_of(FEISHU, WECOM)

    def only_wecom(got):
        return Reply(200, DONE) if "weixin" in got.headers["host"] else Reply(503, b"")

    services.answer(only_wecom)
    assert isinstance(sink.send(notice("opened"), None), Later)
    services.answer(Reply(200, DONE))
    assert sink.send(notice("opened"), None) == Delivered()
    hosts = [got.headers["host"] for got in services.got]
    assert hosts == ["open.feishu.cn", "qyapi.weixin.qq.com", "open.feishu.cn"]
    sink.send(notice("resolved"), None)
    assert len(services.got) == 5, "another message is for both"


def test_a_stranger_s_certificate_is_refused(services, sink_of):
    said = sink_of(FEISHU, ca_file=None).send(notice("opened"), None)
    assert isinstance(said, Later)
    assert "its certificate is not trusted" in said.reason
    assert not services.got


def test_a_proxy_that_is_not_there_is_named(sink_of):
    said = sink_of(FEISHU, proxy="http://127.0.0.1:9").send(notice("opened"), None)
    assert isinstance(said, Later)
    assert "the proxy cannot be used: the connection was refused" in said.reason


def test_a_service_that_hangs_is_left(sink_of):
    server = RawReceiver(hang)
    try:
        address = f"json://127.0.0.1:{server.port}/TOPSECRET"
        said = sink_of(address, proxy=None, timeout_seconds=0.5).send(notice("opened"), None)
        assert said == Later("address 1 (json): no whole answer within the time")
        assert server.connections == 1
    finally:
        server.close()


def test_other_services_are_judged_by_their_status(receiver, sink_of):
    receiver.answer(Reply(200, b'{"code": 7}'))
    sink = sink_of(f"json://127.0.0.1:{receiver.port}/x", proxy=None)
    assert sink.send(notice("grouped"), None) == Delivered()
    assert "2 incidents on" in receiver.got[0].json["title"]


def test_a_web_page_has_taken_nothing(receiver, sink_of):
    receiver.answer(Reply(200, b"<!DOCTYPE html><title>Log in</title>"))
    said = sink_of(f"json://127.0.0.1:{receiver.port}/x", proxy=None).send(notice("opened"), None)
    assert said == Later(
        "address 1 (json): answered with a web page; is there a log-in in between?"
    )


def test_an_address_that_apprise_does_not_know(sink_of):
    said = sink_of("nosuchthing://token").send(notice("opened"), None)
    assert said == Refused("address 1 (nosuchthing): Apprise does not understand it")


@pytest.mark.parametrize("text", ["# nothing", "just words", "dingtalk:token"])
def test_a_file_without_addresses(sink_of, text):
    with pytest.raises(ConfigError, match="urls_file of receiver im: ") as caught:
        sink_of(text)
    assert "words" not in str(caught.value)


def test_the_program_is_not_given_the_secrets_of_others(sink_of, monkeypatch):
    monkeypatch.setenv("OOMWATCH_NOTIFY_OTHER_TOKEN", "s3cret")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials")
    assert "s3cret" not in json.dumps(sink_of(FEISHU)._environment())
    assert "CREDENTIALS_DIRECTORY" not in sink_of(FEISHU)._environment()


def test_preview(services, sink_of):
    said = sink_of(WECOM, lang="zh").preview(notice("resolved"), None)
    assert said.startswith("【已恢复】")
    assert not services.got
