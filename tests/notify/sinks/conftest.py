from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from loopback_receiver import Receiver


@pytest.fixture(scope="module")
def shared_receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


@pytest.fixture
def receiver(shared_receiver: Receiver) -> Receiver:
    """A receiver that answers 200 until it is told otherwise."""
    shared_receiver.clear()
    return shared_receiver


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[str], str]:
    """Writes a secret to a file and gives its path."""
    count = iter(range(100))

    def write(text: str) -> str:
        path = tmp_path / f"secret{next(count)}"
        path.write_text(text + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """An authority that no system knows."""
    return trustme.CA()


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture(scope="session")
def tls_context(authority: trustme.CA) -> ssl.SSLContext:
    """Of servers that are called 127.0.0.1, and of the services that a proxy plays."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(
        "127.0.0.1",
        "hooks.slack.com",
        "oapi.dingtalk.com",
        "open.feishu.cn",
        "open.larksuite.com",
        "qyapi.weixin.qq.com",
    ).configure_cert(context)
    return context


@pytest.fixture(autouse=True)
def no_proxy_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
