from __future__ import annotations

import pytest

from oomwatch.engines.endpoints import metrics_endpoint


@pytest.mark.parametrize(
    ("engine", "arguments", "listening", "url", "reason"),
    [
        ("vllm", {}, [("0.0.0.0", 8000)], "http://127.0.0.1:8000/metrics", None),
        ("vllm", {"--port": "9"}, [("::", 9), ("::", 7)], "http://127.0.0.1:9/metrics", None),
        ("vllm", {}, [("10.1.2.3", 8000)], "http://10.1.2.3:8000/metrics", None),
        ("vllm", {}, [("::1", 8000)], "http://[::1]:8000/metrics", None),
        ("vllm", {"--port": "0"}, [("127.0.0.1", 4711)], "http://127.0.0.1:4711/metrics", None),
        ("vllm", {"--ssl-keyfile": "k"}, [("::", 8000)], "https://127.0.0.1:8000/metrics", None),
        ("vllm", {}, [], "http://127.0.0.1:8000/metrics", "not seen to listen"),
        ("vllm", {}, [("::", 1), ("::", 2)], "http://127.0.0.1:8000/metrics", "not among"),
        (
            "vllm",
            {"--disable-log-stats": True},
            [("::", 8000)],
            "http://127.0.0.1:8000/metrics",
            "--disable-log-stats",
        ),
        ("vllm", {"--uds": "/run/x"}, [("::", 8000)], None, "Unix socket"),
        ("vllm", {"--headless": True}, [], None, "headless"),
        ("vllm", None, [], None, "no port"),
        ("vllm", None, [("::", 1), ("::", 2)], None, "several ports: 1, 2"),
        ("sglang", {}, [("::", 30000)], None, "--enable-metrics"),
        (
            "sglang",
            {"--enable-metrics": True},
            [("::", 30000)],
            "http://127.0.0.1:30000/metrics",
            None,
        ),
        ("llama.cpp", {}, [], None, "--metrics"),
        ("ollama", {}, [("::", 11434)], None, "no metrics page"),
    ],
)
def test_where_the_metrics_are(engine, arguments, listening, url, reason):
    endpoint = metrics_endpoint(engine, arguments, listening)
    assert endpoint.url() == url
    assert (endpoint.reason is None) if reason is None else (reason in (endpoint.reason or ""))


def test_server_in_another_namespace_is_asked_at_its_own_address():
    endpoint = metrics_endpoint("vllm", {}, [("0.0.0.0", 8000)])
    assert endpoint.url(address="172.17.0.5") == "http://172.17.0.5:8000/metrics"
    assert metrics_endpoint("vllm", {"--uds": "x"}, []).url(address="172.17.0.5") is None
