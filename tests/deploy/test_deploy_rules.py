"""The shipped rules, by `promtool test rules`: what fires, what does not, and what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oomwatch.export.metrics import METRICS
from oomwatch.report.runbook import runbook_names, runbook_page

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "oomwatch.rules.yml"
HOST = 'instance="gpu-1:20666"'
OPEN = (
    f'oomwatch_incident_open{{{HOST},incident_id="inc-1",class="startup",cause="kv_lt_max_len",'
    'severity="%s",kind="%s",engine_id="chat"}'
)
KV = f'oomwatch_kv_usage_ratio{{{HOST},engine_id="chat",engine="0"}}'
WAITING = f'oomwatch_requests_waiting{{{HOST},engine_id="chat",engine="0"}}'
AHEAD = f'oomwatch_forecast_exhaustion_seconds{{{HOST},resource="gpu",gpu="0"}}'
TITLE = f'oomwatch_cause_info{{{HOST},cause="kv_lt_max_len",title="The KV cache is too small"}}'
TOTAL = f'oomwatch_incidents_total{{{HOST},job="oomwatch",class="%s",cause="%s"}}'
NVML = f'oomwatch_source_success{{{HOST},source="nvml"}}'
SCRAPED = f'oomwatch_scrape_success{{{HOST},engine_id="chat"}}'
STATE = f'oomwatch_engine_state{{{HOST},engine_id="chat",state="%s"}}'
OUTBOX = f'oomwatch_receiver_messages_waiting{{{HOST},receiver="oncall",state="%s"}}'
LOST = f'oomwatch_receiver_messages_total{{{HOST},receiver="oncall",outcome="%s"}}'
TAKES = f'oomwatch_receiver_success{{{HOST},receiver="oncall"}}'
HOUR = 240  # of steps of 15 s

# Alert, series with their values every 15 s, and the minute at which it fires or does not.
CASES = [
    ("OomwatchIncidentCritical", {OPEN % ("critical", "failure"): "1x20"}, "1m", True),
    ("OomwatchIncidentCritical", {OPEN % ("warning", "failure"): "1x20"}, "2m", False),
    ("OomwatchIncidentCritical", {OPEN % ("critical", "failure"): "1x4 stale"}, "1m45s", True),
    ("OomwatchIncidentCritical", {OPEN % ("critical", "failure"): "1x4 stale"}, "5m", False),
    ("OomwatchIncidentWarning", {OPEN % ("warning", "kv_pressure"): "1x20"}, "1m", True),
    ("OomwatchIncidentWarning", {OPEN % ("info", "failure"): "1x20"}, "2m", False),
    ("OomwatchIncidentBrief", {TOTAL % ("startup", "kv_lt_max_len"): "0x4 1x40"}, "3m", True),
    ("OomwatchIncidentBrief", {TOTAL % ("not_oom", "bad_arguments"): "0x4 1x40"}, "3m", False),
    (
        "OomwatchIncidentBrief",  # it was told while it was open
        {
            TOTAL % ("startup", "kv_lt_max_len"): "0x4 1x40",
            OPEN % ("critical", "failure"): "_x4 1x4 stale",
        },
        "4m",
        False,
    ),
    ("OomwatchIncidentRecurs", {TOTAL % ("startup", "kv_lt_max_len"): "0+1x5 5x60"}, "5m", True),
    ("OomwatchIncidentRecurs", {TOTAL % ("startup", "kv_lt_max_len"): "0 1 2x60"}, "5m", False),
    (
        "OomwatchGpuMissing",
        {f"oomwatch_gpus_present{{{HOST}}}": "7x40", f"oomwatch_gpus_expected{{{HOST}}}": "8x40"},
        "3m",
        True,
    ),
    (
        "OomwatchGpuMissing",
        {
            f"oomwatch_gpus_present{{{HOST}}}": "7x40",
            f"oomwatch_gpus_expected{{{HOST}}}": "8x40",
            OPEN % ("critical", "gpu"): "1x40",
        },
        "3m",
        False,
    ),
    (
        "OomwatchGpuMemoryUnattributed",
        {f'oomwatch_gpu_memory_unattributed_bytes{{{HOST},gpu="0"}}': "9e9x100"},
        "20m",
        True,
    ),
    (
        "OomwatchGpuMemoryUnattributed",
        {f'oomwatch_gpu_memory_unattributed_bytes{{{HOST},gpu="0"}}': "9e9x20 1e9x80"},
        "20m",
        False,
    ),
    ("OomwatchKvCacheTooSmall", {KV: f"0.97x{HOUR}", WAITING: f"4x{HOUR}"}, "50m", True),
    ("OomwatchKvCacheTooSmall", {KV: f"0.97x{HOUR}", WAITING: f"0x{HOUR}"}, "50m", False),
    ("OomwatchMemoryRunsOut", {AHEAD: "900x40"}, "8m", True),
    ("OomwatchMemoryRunsOut", {AHEAD: "9000x40"}, "8m", False),
    (
        "OomwatchMemoryRunsOut",
        {AHEAD: "900x40", OPEN % ("warning", "gpu_memory"): "1x40"},
        "8m",
        False,
    ),
    ("OomwatchDown", {f'up{{{HOST},job="oomwatch"}}': "0x40"}, "7m", True),
    ("OomwatchDown", {f'up{{{HOST},job="node"}}': "0x40"}, "7m", False),
    ("OomwatchGpusUnread", {NVML: "0x40"}, "7m", True),
    ("OomwatchGpusUnread", {NVML: "0x40", OPEN % ("critical", "driver"): "1x40"}, "7m", False),
    ("OomwatchEngineUnread", {SCRAPED: "0x40", STATE % "unresponsive": "1x40"}, "7m", True),
    ("OomwatchEngineUnread", {SCRAPED: "0x40", STATE % "starting": "1x40"}, "7m", False),
    ("OomwatchEngineUnread", {SCRAPED: "0x40", STATE % "starting": "0x40"}, "7m", True),
    ("OomwatchEngineUnread", {SCRAPED: "0x40", OPEN % ("critical", "zombie"): "1x40"}, "7m", False),
    (
        "OomwatchStoreNotWritten",
        {f'oomwatch_source_success{{{HOST},source="store"}}': "0x40"},
        "7m",
        True,
    ),
    (
        "OomwatchRecordsDropped",
        {f'oomwatch_self_dropped_total{{{HOST},queue="store_samples"}}': "0x4 50x40"},
        "4m",
        True,
    ),
    ("OomwatchMessagesLost", {LOST % "failed": "0x4 1x40"}, "3m", True),
    ("OomwatchMessagesLost", {LOST % "failed": "1x40"}, "3m", False),  # it was before
    ("OomwatchMessagesLost", {LOST % "delivered": "0x4 1x40"}, "3m", False),
    ("OomwatchReceiverFails", {TAKES: "0x60"}, "12m", True),  # also with nothing to send
    ("OomwatchReceiverFails", {TAKES: "1x60"}, "12m", False),
    ("OomwatchReceiverFails", {TAKES: "0x20 1 0x40"}, "12m", False),
    ("OomwatchMessagesWait", {OUTBOX % "due": f"3x{HOUR}", TAKES: f"1x{HOUR}"}, "40m", True),
    ("OomwatchMessagesWait", {OUTBOX % "due": "3x40 0 3x190", TAKES: f"1x{HOUR}"}, "38m", False),
    ("OomwatchMessagesWait", {OUTBOX % "held": f"3x{HOUR}", TAKES: f"1x{HOUR}"}, "40m", False),
    ("OomwatchMessagesWait", {OUTBOX % "due": f"3x{HOUR}", TAKES: f"0x{HOUR}"}, "40m", False),
    ("OomwatchStuck", {f"oomwatch_self_stuck_threads{{{HOST}}}": "1x40"}, "4m", True),
    ("OomwatchConfigWrong", {f"oomwatch_config_reload_success{{{HOST}}}": "0x60"}, "12m", True),
    (
        "OomwatchSamplesLate",
        {f"oomwatch_self_sample_late_max_seconds{{{HOST}}}": "3x40"},
        "8m",
        True,
    ),
    ("OomwatchSeriesLeftOut", {f"oomwatch_self_series_left_out{{{HOST}}}": "9x180"}, "40m", True),
]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def groups() -> list[dict]:
    return yaml.safe_load(RULES.read_text())["groups"]


def alerts() -> dict[str, dict]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def load(name: str):
    path = DEPLOY / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"deploy_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- form
def test_every_rule_has_what_a_rule_should_have():
    assert len(alerts()) == sum(len(group["rules"]) for group in groups())  # each name once
    for name, rule in alerts().items():
        assert re.fullmatch(r"Oomwatch([A-Z][a-z]+)+", name)
        assert rule["for"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name


def test_every_rule_asks_for_series_that_there_are_by_labels_that_they_have():
    for name, rule in alerts().items():
        check_query(rule["expr"], name)


def check_query(query: str, where: str) -> None:
    """Names of metrics, and the labels that they are chosen by, are those of the table."""
    found = re.findall(r"\b(oomwatch_\w+)(?:\{([^}]*)\})?", query)
    assert found or 'up{job="oomwatch"}' in query, where
    for metric, chosen in found:
        assert metric in METRICS, f"{where}: {metric}"
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", chosen)) - {"instance", "job"}
        assert labels <= set(METRICS[metric].labels), f"{where}: {metric}: {labels}"


def test_every_alert_leads_to_a_page_that_there_is():
    for name, rule in alerts().items():
        url = rule["annotations"]["runbook_url"]
        assert url.startswith("http://{{ $labels.instance }}/runbooks/"), name
        named = set(re.findall(r"\w+", url.partition("/runbooks/")[2])) & set(runbook_names())
        assert named or url.endswith("{{ $labels.cause }}"), name


def test_the_page_about_the_agent_has_every_alert_about_it():
    agent = next(group for group in groups() if group["name"] == "oomwatch-agent")
    page = runbook_page("agent")
    for half in page.split("\n---\n"):
        assert {r["alert"] for r in agent["rules"]} == set(re.findall(r"`(Oomwatch\w+)`", half))


# ---------------------------------------------------------------- promtool
@needs_promtool
def test_promtool_finds_nothing_wrong():
    subprocess.run(["promtool", "check", "rules", RULES], check=True, capture_output=True)


@needs_promtool
def test_what_fires_and_what_does_not(tmp_path):
    assert {name for name, *_ in CASES} == set(alerts())
    tests = []
    for name, series, at, fires in CASES:
        # By the table, that it fires: then it does with the labels that the series has.
        query = f'count(ALERTS{{alertname="{name}",alertstate="firing",{HOST}}})'
        expected = [{"labels": "{}", "value": 1}] if fires else []
        tests.append(
            {
                "name": f"{name} {'fires' if fires else 'does not fire'} at {at}: {series}",
                "interval": "15s",
                "input_series": [
                    {"series": each, "values": values} for each, values in series.items()
                ],
                "promql_expr_test": [{"expr": query, "eval_time": at, "exp_samples": expected}],
            }
        )
    run_promtool(tmp_path, tests)


@needs_promtool
def test_what_an_alert_says(tmp_path):
    incident = OPEN % ("critical", "failure")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', incident))
    critical = {
        "interval": "15s",
        "input_series": [
            {"series": incident, "values": "1x20"},
            {"series": TITLE, "values": "1x20"},
            {"series": TITLE.replace("gpu-1", "gpu-2").replace("too", "not too"), "values": "1x20"},
        ],
        "alert_rule_test": [
            {
                "eval_time": "1m",
                "alertname": "OomwatchIncidentCritical",
                "exp_alerts": [
                    {
                        "exp_labels": labels,
                        "exp_annotations": {
                            "summary": "The KV cache is too small: chat on gpu-1:20666",
                            "description": "Incident inc-1 (startup, kv_lt_max_len) is open. On that "
                            "host: `oomwatch incidents show inc-1` for the evidence, `oomwatch "
                            "flags inc-1` for the flags that fix it.",
                            "runbook_url": "http://gpu-1:20666/runbooks/kv_lt_max_len",
                        },
                    }
                ],
            }
        ],
    }
    untitled = {
        **critical,
        "input_series": [{"series": incident, "values": "1x20"}],
        "alert_rule_test": [changed(critical["alert_rule_test"][0], "kv_lt_max_len: chat on")],
    }
    again = {
        "interval": "15s",
        "input_series": [
            {"series": TOTAL % ("startup", "kv_lt_max_len"), "values": "0+1x5 5x60"},
            {"series": TITLE, "values": "1x60"},
        ],
        "alert_rule_test": [
            {
                "eval_time": "5m",
                "alertname": "OomwatchIncidentRecurs",
                "exp_alerts": [
                    {
                        "exp_labels": {
                            **{name: labels[name] for name in ("instance", "class", "cause")},
                            "job": "oomwatch",
                            "severity": "warning",
                        },
                        "exp_annotations": {
                            "summary": "Again and again on gpu-1:20666: The KV cache is too small",
                            "description": "5 incidents (startup, kv_lt_max_len) within 6 h: what "
                            "was done about the last one did not cure it. On that host: `oomwatch "
                            "incidents`.",
                            "runbook_url": "http://gpu-1:20666/runbooks/kv_lt_max_len",
                        },
                    }
                ],
            }
        ],
    }
    ahead = {
        "interval": "15s",
        "input_series": [{"series": AHEAD, "values": "900x40"}],
        "alert_rule_test": [
            {
                "eval_time": "8m",
                "alertname": "OomwatchMemoryRunsOut",
                "exp_alerts": [
                    {
                        "exp_labels": {
                            "instance": "gpu-1:20666",
                            "resource": "gpu",
                            "gpu": "0",
                            "severity": "info",
                        },
                        "exp_annotations": {
                            "summary": "gpu memory on gpu-1:20666 is used up in 15m 0s",
                            "description": "At its present pace GPU 0 is full soon, and detection "
                            "of it is off or observes only.",
                            "runbook_url": "http://gpu-1:20666/runbooks/gpu_leak_growth",
                        },
                    }
                ],
            }
        ],
    }
    run_promtool(tmp_path, [critical, untitled, again, ahead])


def changed(case: dict, begins: str) -> dict:
    """The same alert with another beginning of its summary, up to the host."""
    (alert,) = case["exp_alerts"]
    said = alert["exp_annotations"]
    summary = f"{begins} {said['summary'].rpartition(' ')[2]}"
    return {**case, "exp_alerts": [{**alert, "exp_annotations": {**said, "summary": summary}}]}


def run_promtool(folder: Path, tests: list[dict]) -> None:
    path = folder / "rules.test.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", path], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- what is made of them
def test_generated_files_are_up_to_date():
    for path, text in load("generate").files():
        assert path.read_text() == text, f"{path.name}: run deploy/generate.py"


def test_the_prometheusrule_holds_the_same_rules():
    document = yaml.safe_load((DEPLOY / "prometheus" / "oomwatch.prometheusrule.yml").read_text())
    assert document["kind"] == "PrometheusRule"
    assert document["spec"]["groups"] == groups()


def test_links_to_a_place_of_ones_own():
    words = [sys.executable, str(DEPLOY / "generate.py"), "--runbooks", "https://wiki/oom/"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    links = {
        rule["annotations"]["runbook_url"]
        for group in yaml.safe_load(done.stdout)["groups"]
        for rule in group["rules"]
    }
    assert "https://wiki/oom/{{ $labels.cause }}" in links
    assert all(link.startswith("https://wiki/oom/") for link in links)


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")
def test_the_example_of_a_route():
    path = DEPLOY / "alertmanager" / "oomwatch.example.yml"
    subprocess.run(["amtool", "check-config", path], check=True, capture_output=True)
    for labels, receiver in (
        (["alertname=OomwatchIncidentCritical", "severity=critical"], "inference-oncall"),
        (["alertname=OomwatchIncidentWarning", "severity=warning"], "inference-team"),
        (["alertname=OomwatchIncident", "severity=critical", "host=gpu-1"], "inference-oncall"),
        (["alertname=OomwatchTest", "severity=info"], "inference-team"),
        (["alertname=OomwatchSamplesLate", "severity=info"], "nobody"),
        (["alertname=Other", "severity=critical"], "nobody"),
    ):
        words = ["amtool", "config", "routes", "test", f"--config.file={path}", *labels]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == receiver


# ---------------------------------------------------------------- the dashboard
def test_every_query_of_the_dashboard_asks_for_series_that_there_are():
    module = load("grafana/dashboard")
    for query in module.queries():
        check_query(query, query)
    for variable in module.dashboard()["templating"]["list"][1:]:
        check_query(variable["query"], variable["name"])


def test_the_dashboard_is_what_grafana_takes():
    board = json.loads((DEPLOY / "grafana" / "oomwatch.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]  # none lies on another
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


# ---------------------------------------------------------------- the pages that alerts lead to
@pytest.mark.parametrize("name", runbook_names())
def test_a_page_says_what_it_is_how_to_be_sure_and_what_to_do_in_both_languages(name):
    page = runbook_page(name)
    english, _, chinese = page.partition("\n---\n")
    assert english.startswith("# ")
    assert re.search(r"[\u4e00-\u9fff]", chinese.partition("# ")[2].partition("\n")[0])
    assert "`oomwatch " in english
    assert "`oomwatch " in chinese
    if name not in {"agent", "unknown"}:
        for heading in ("How it looks", "How to be sure", "What to do"):
            assert f"\n## {heading}\n\n" in english
        for heading in ("表现", "如何确认", "怎么办"):
            assert f"\n## {heading}\n\n" in chinese
        for metric in re.findall(r"`(oomwatch_\w+)`", page):
            assert metric in METRICS


def test_there_is_no_page_of_what_is_no_cause():
    for name in ("", "..", "../pages/en/fragmentation", "fragmentation.md", "agent/../agent"):
        assert runbook_page(name) is None
