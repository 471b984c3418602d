"""OTLP, read by the protocol's own messages, over a real HTTP receiver."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.server
import json
import socket
import threading

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from some_host import AT, GIB, gpu, host, incident

from oomwatch.agent.otlp_feed import OtlpFeed
from oomwatch.config import ConfigError
from oomwatch.config.export import OtlpConfig
from oomwatch.export.families import Exporter
from oomwatch.export.metrics import METRICS
from oomwatch.export.otlp import log_record, metrics_request, otlp_name, resource_of
from oomwatch.export.push import OtlpSender, endpoints_of, headers_of
from oomwatch.export.snapshot import PeakFigures


class Collector:
    """Answers with `statuses` in turn, the last of them from then on; keeps what it was sent."""

    def __init__(self) -> None:
        self.statuses: list[int] = [200]
        self.retry_after = ""
        self.received: list[tuple[str, dict, dict]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                data = json.loads(gzip.decompress(body))
                outer.received.append((self.path, dict(self.headers), data))
                status = outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0]
                self.send_response(status)
                if outer.retry_after:
                    self.send_header("Retry-After", outer.retry_after)
                if status == 302:
                    self.send_header("Location", f"http://127.0.0.1:{outer.port}/elsewhere")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector():
    with contextlib.closing(Collector()) as one:
        yield one


def sender_to(collector, **headers) -> OtlpSender:
    resource = resource_of("gpu-1", "0.1.0", "0123456789abcdef")
    return OtlpSender(endpoints_of(collector.url, {}), resource, "0.1.0", headers=headers)


def values(attributes) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in attributes}


def metrics_of(snapshot) -> tuple[dict, dict]:
    """Attributes of the resource, and metrics by name, as the protocol's own messages."""
    resource = resource_of("gpu-1", "0.1.0", "0123456789abcdef")
    body = metrics_request([Exporter().samples(snapshot)], snapshot, resource)
    message = json_format.Parse(json.dumps(body), ExportMetricsServiceRequest())
    (resource_metrics,) = message.resource_metrics
    (scope_metrics,) = resource_metrics.scope_metrics
    assert scope_metrics.scope.name == "oomwatch"
    names = [metric.name for metric in scope_metrics.metrics]
    assert len(names) == len(set(names))
    return values(resource_metrics.resource.attributes), dict(
        zip(names, scope_metrics.metrics, strict=True)
    )


# ---------------------------------------------------------------- figures
def test_every_figure_of_the_page_is_sent():
    snapshot = host(gpus=2, holders=2, engines=2)
    resource, metrics = metrics_of(snapshot)
    assert resource["service.name"] == "oomwatch"
    assert resource["host.name"] == "gpu-1"
    assert resource["host.id"] == "0123456789abcdef"
    samples = {metric.name: found for metric, found in Exporter().samples(snapshot)}
    assert set(metrics) == {otlp_name(METRICS[name]) for name in samples}
    for name, found in samples.items():
        metric = metrics[otlp_name(METRICS[name])]
        points = getattr(metric, metric.WhichOneof("data")).data_points
        read = [point.as_int if point.HasField("as_int") else point.as_double for point in points]
        assert read == [value for _, value in found], name
        assert {point.time_unix_nano for point in points} == {round(AT * 1e9)}


def test_gpus_go_by_the_conventions_for_hardware():
    snapshot = host()
    _, metrics = metrics_of(snapshot)
    usage = metrics["hw.gpu.memory.usage"]
    assert usage.unit == "By"
    assert not usage.sum.is_monotonic  # an UpDownCounter
    assert usage.sum.aggregation_temporality == 2
    (point,) = usage.sum.data_points
    assert point.as_int == 70 * GIB
    assert values(point.attributes) == {
        "hw.id": "GPU-0",
        "hw.type": "gpu",
        "hw.vendor": "NVIDIA",
        "hw.model": "NVIDIA H100",
        "hw.driver_version": "580.65.06",
        "gpu": "0",
    }
    assert metrics["hw.gpu.memory.limit"].sum.data_points[0].as_int == 80 * GIB
    assert metrics["hw.gpu.utilization"].gauge.data_points[0].as_double == 0.6
    assert metrics["oomwatch.preemptions"].sum.is_monotonic


def test_names_of_places_are_those_of_the_conventions():
    holder = host().holders[0]
    placed = dataclasses.replace(holder, container="c1", namespace="inference", pod="chat-0", pid=7)
    _, metrics = metrics_of(dataclasses.replace(host(), holders=(placed,)))
    (point,) = metrics["oomwatch.gpu.holder.memory"].gauge.data_points
    found = values(point.attributes)
    assert found["container.name"] == "c1"
    assert found["k8s.namespace.name"] == "inference"
    assert found["k8s.pod.name"] == "chat-0"
    assert found["process.pid"] == "7"


def test_a_backend_makes_the_names_of_the_page_of_them():
    """By the rule of OpenTelemetry: full stops to underscores, the unit added, then _total."""
    units = {"By": "_bytes", "s": "_seconds", "1": "_ratio"}
    for metric in METRICS.values():
        if metric.otlp is None:
            made = otlp_name(metric).replace(".", "_") + units.get(metric.unit, "")
            assert made + ("_total" if metric.kind == "counter" else "") == metric.name


# ---------------------------------------------------------------- incidents
def test_an_incident_is_a_log_record():
    body = {
        "resourceLogs": [{"scopeLogs": [{"logRecords": [log_record("opened", incident(), AT)]}]}]
    }
    message = json_format.Parse(json.dumps(body), ExportLogsServiceRequest())
    record = message.resource_logs[0].scope_logs[0].log_records[0]
    assert record.event_name == "oomwatch.incident.opened"
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert record.body.string_value == "One request does not fit."
    assert record.time_unix_nano == round((AT - 10) * 1e9)
    assert record.observed_time_unix_nano == round(AT * 1e9)
    assert values(record.attributes) == {
        "event.name": "oomwatch.incident.opened",
        "oomwatch.incident.id": "inc-000000000000",
        "oomwatch.incident.kind": "failure",
        "oomwatch.incident.severity": "critical",
        "oomwatch.incident.class": "startup",
        "oomwatch.incident.cause": "kv_lt_max_len",
        "oomwatch.engine.id": "vllm-8000",
    }


def test_a_summary_is_bounded_and_fit():
    hostile = incident(summary="\x1b[31m" + "x" * 5000, severity="strange")
    record = log_record("closed", hostile, AT)
    assert record["body"]["stringValue"].startswith("?[31mx")
    assert len(record["body"]["stringValue"]) == 1024
    assert record["severityText"] == "INFO"


# ---------------------------------------------------------------- sending
def test_it_is_sent_as_the_specification_says(collector):
    sender = sender_to(collector, Authorization="Bearer geheim")
    snapshot = host()
    assert sender.send_metrics(
        metrics_request([Exporter().samples(snapshot)], snapshot, sender.resource)
    )
    sender.add_record(log_record("opened", incident(), AT))
    assert sender.send_records()
    (path, headers, body), (log_path, _, logs) = collector.received
    assert (path, log_path) == ("/v1/metrics", "/v1/logs")
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer geheim"
    json_format.Parse(json.dumps(body), ExportMetricsServiceRequest())
    json_format.Parse(json.dumps(logs), ExportLogsServiceRequest())


def test_incidents_wait_for_a_collector_that_is_not_there_and_keep_their_order(collector):
    sender = sender_to(collector)
    collector.statuses = [503, 429, 200]
    for number in range(300):
        sender.add_record(log_record("opened", incident(number), AT))
    assert not sender.send_records()
    assert not sender.send_records()
    assert len(sender) == 300
    assert sender.send_records()
    assert len(sender) == 0
    told = [
        pair["value"]["stringValue"]
        for _, _, body in collector.received[2:]
        for record in body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
        for pair in record["attributes"]
        if pair["key"] == "oomwatch.incident.id"
    ]
    assert told == [incident(number).id for number in range(300)]


def test_a_pause_that_it_asks_for_is_kept(collector):
    sender = sender_to(collector)
    collector.statuses, collector.retry_after = [429, 200], "100"
    sender.add_record(log_record("opened", incident(), AT))
    assert not sender.send_records()
    assert not sender.send_records()
    assert not sender.send_metrics({})
    assert len(collector.received) == 1


@pytest.mark.parametrize("status", [400, 401, 302])
def test_what_is_refused_for_good_is_let_go_and_counted(collector, status, caplog):
    sender = sender_to(collector, Authorization="Bearer geheim")
    collector.statuses = [status]
    sender.add_record(log_record("opened", incident(), AT))
    assert sender.send_records()
    assert (len(sender), sender.dropped_total) == (0, 1)
    assert len(collector.received) == 1  # a redirect is not followed
    assert [record.message for record in caplog.records] == [
        f"otlp: the collector refuses what is sent: {status}"
    ]


def test_a_collector_that_never_comes_to_an_end_is_let_go(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def dribble():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                while not ended.wait(0.02):
                    connection.sendall(b"a")

        thread = threading.Thread(target=dribble)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        sender = OtlpSender(endpoints_of(url, {}), {}, "0", headers={}, whole_seconds=0.3)
        assert not sender.send_metrics({})
        assert "nothing can be sent" in caplog.text
        ended.set()
        thread.join(10)


def test_passwords_of_the_environment_are_not_sent(collector, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ann password geheim\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sender_to(collector, Authorization="Bearer ours").send_metrics({})
    assert sender_to(collector).send_metrics({})
    (_, first, _), (_, second, _) = collector.received
    assert first["Authorization"] == "Bearer ours"
    assert "Authorization" not in second


def test_without_a_collector_nothing_is_raised_and_it_is_said_once(caplog):
    sender = OtlpSender(
        ("http://user:geheim@127.0.0.1:9/v1/metrics", "http://127.0.0.1:9/v1/logs"),
        {},
        "0",
        headers={},
    )
    assert not sender.send_metrics({})
    assert not sender.send_metrics({})
    assert len(caplog.records) == 1
    assert "geheim" not in caplog.text


def test_too_many_incidents_are_let_go_the_oldest_first():
    sender = OtlpSender(("", ""), {}, "0", headers={})
    for number in range(1030):
        sender.add_record({"number": number})
    assert (len(sender), sender.dropped_total) == (1024, 6)
    assert sender._waiting[0] == {"number": 6}


@pytest.mark.parametrize(
    ("endpoint", "environ", "expected"),
    [
        (None, {}, "http://127.0.0.1:4318/v1/metrics"),
        ("https://otel:4318/", {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://no"},
         "https://otel:4318/v1/metrics"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318"}, "http://otel:4318/v1/metrics"),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m/x"}, "http://m/x"),
    ],
)  # fmt: skip
def test_where_it_is_sent(endpoint, environ, expected):
    assert endpoints_of(endpoint, environ)[0] == expected


def test_headers_of_the_environment():
    given = {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20abc, X-Tenant = a,nonsense"}
    assert headers_of(given) == {"Authorization": "Basic abc", "X-Tenant": "a"}


def test_who_sends_is_the_same_over_restarts_and_another_on_another_host():
    def instance(host, machine):
        pairs = resource_of(host, "1", machine)["attributes"]
        return {pair["key"]: pair["value"]["stringValue"] for pair in pairs}["service.instance.id"]

    assert instance("a", None) == instance("a", None) != instance("b", None)
    assert instance("a", "m") == instance("b", "m")


def test_a_mig_instance_names_its_gpu():
    piece = dataclasses.replace(
        gpu(mig="MIG-1"), sample=dataclasses.replace(gpu().sample, uuid="MIG-1")
    )
    _, metrics = metrics_of(dataclasses.replace(host(), gpus=(gpu(), piece)))
    found = [values(p.attributes) for p in metrics["hw.gpu.memory.usage"].sum.data_points]
    assert [each["hw.id"] for each in found] == ["GPU-0", "MIG-1"]
    assert found[1]["hw.parent"] == "GPU-0"


# ---------------------------------------------------------------- incidents as they come and go
class Told:
    """What the feed asks: samples of a host, and which incidents are open."""

    host = "gpu-1"

    def __init__(self) -> None:
        self.open: list = []

    def samples(self, _asking):
        snapshot = host()
        exporter = Exporter()
        return snapshot, (exporter.samples(snapshot), exporter.peaks(snapshot, PeakFigures()))

    def open_incidents(self):
        return self.open


def test_what_is_opened_and_closed_is_told_once_and_what_was_open_before_is_not(
    collector, tmp_path
):
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Bearer geheim\n")
    told = Told()
    told.open = [incident(1)]
    config = OtlpConfig(enabled=True, endpoint=collector.url, headers_file=str(headers))
    feed = OtlpFeed(config, told, told, {})
    feed._step()
    told.open = [incident(1), incident(2)]
    feed._step()
    feed._step()
    told.open = []
    feed._step()
    records = [
        (record["eventName"], record["attributes"][1]["value"]["stringValue"])
        for path, _, body in collector.received
        if path == "/v1/logs"
        for record in body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    ]
    assert records[0] == ("oomwatch.incident.opened", incident(2).id)
    assert sorted(records[1:]) == [
        ("oomwatch.incident.closed", incident(1).id),
        ("oomwatch.incident.closed", incident(2).id),
    ]
    figures = [(h, body) for path, h, body in collector.received if path == "/v1/metrics"]
    assert len(figures) == 1  # every 30 s
    assert figures[0][0]["Authorization"] == "Bearer geheim"


def test_a_headers_file_that_is_missing_is_told(tmp_path):
    config = OtlpConfig(enabled=True, headers_file=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"export\.otlp\.headers_file"):
        OtlpFeed(config, Told(), Told(), {})
