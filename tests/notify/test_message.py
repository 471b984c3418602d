from __future__ import annotations

import dataclasses
import json

import pytest
from incident_samples import AT, PROMPT, failure, pressure, stored

from oomwatch.causes import CAUSES
from oomwatch.notify.changes import change_of
from oomwatch.notify.message import incident_notice
from oomwatch.notify.notice import Notice, notice_from_json, notice_to_json
from oomwatch.records import Evidence, Trigger, TriggerKind
from oomwatch.remedies.render import combined
from oomwatch.report.flags import typed_env, typed_flags
from oomwatch.report.pages import title


def told(incident, **options):
    return incident_notice(incident, **{"labels": {}, "runbook_base": "", **options})


def test_a_failure_is_told_with_all_that_a_message_needs():
    notice = told(stored(diagnosis=failure()), labels={"team": "chat"})
    assert notice.headline == title("prefill_activation_peak", "en")
    assert notice.severity == "critical"
    assert (notice.host, notice.engine_id, notice.engine, notice.version, notice.model) == (
        "gpu-07", "chat-70b", "vllm", "0.11.0", "/m/Qwen3-32B",
    )  # fmt: skip
    assert (notice.incident_class, notice.cause, notice.confidence) == (
        "long_context",
        "prefill_activation_peak",
        0.83,
    )
    assert notice.why == "One step needed more memory than was left (3.1 GiB asked, 640 MiB free)."
    assert notice.labels == {"team": "chat"}
    assert notice.runbook_url is None


def test_the_top_three_remedies_are_ready_to_paste():
    first, second, third = told(stored(diagnosis=failure())).remedies
    assert first.flags == ("--max-num-batched-tokens 4096",)
    assert first.validated
    assert "KV cache 148,928 → 150,048 tokens" in first.effect
    assert second.flags == ("PYTORCH_ALLOC_CONF=expandable_segments:True",)
    assert second.action == "remove --swap-space"
    assert not second.validated
    assert third.flags == ()
    assert third.action == "limit them"


def test_the_flags_to_set_together_are_those_of_the_command():
    [incident] = failure().incidents
    changes = combined(incident.remedies)
    expected = (*typed_flags(changes.set), *typed_env(changes.env))
    assert len(expected) == 2
    assert told(stored(diagnosis=failure())).flags == expected

    enough = dataclasses.replace(incident.remedies[0], enough=True)
    alone = dataclasses.replace(incident, remedies=(enough, *incident.remedies[1:]))
    notice = told(stored(diagnosis=dataclasses.replace(failure(), incidents=(alone,))))
    assert notice.flags == expected[:1]


def test_flags_that_are_too_long_are_never_cut():
    diagnosis = failure()
    [incident] = diagnosis.incidents
    long = dataclasses.replace(incident.remedies[0], set={"--compilation-config": "x" * 2000})
    incident = dataclasses.replace(incident, remedies=(long,))
    [remedy] = told(
        stored(diagnosis=dataclasses.replace(diagnosis, incidents=(incident,)))
    ).remedies
    assert remedy.flags == ()
    assert remedy.action == "get the flags with `oomwatch flags inc-0123456789ab`"


def test_the_line_of_memory_is_of_the_gpu_that_ran_out():
    notice = told(stored(diagnosis=failure()))
    assert notice.memory == "GPU 1 (80.0 GiB): KV cache 36.0 GiB, weights 32.0 GiB, free 640 MiB"
    assert notice.gpus == (0, 1)

    named = told(stored(diagnosis=failure(), gpu=0))
    assert named.gpus == (0,)
    assert named.memory == "GPU 0 (80.0 GiB): weights 32.0 GiB, free 40.0 GiB"


def test_what_decided_stands_first_among_the_evidence():
    assert told(stored(diagnosis=failure())).evidence == (
        "server.log:106: torch.OutOfMemoryError: CUDA out of memory.",
        "free: 640 MiB",
        "--max-num-batched-tokens: 32,768",
    )


@pytest.mark.parametrize(
    ("kind", "family", "values", "severity"),
    [
        ("log_failure", "failure", {}, "critical"),
        ("gpu_lost", "gpu", {}, "critical"),
        ("driver_unresponsive", "driver", {}, "critical"),
        ("zombie_engine", "zombie", {}, "critical"),
        ("kv_saturation", "kv_pressure", {}, "warning"),
        ("forecast_gpu", "gpu_memory", {"eta_seconds": 60.0}, "warning"),
        ("gpu_headroom", "gpu_memory", {"level": "warn"}, "warning"),
        ("gpu_headroom", "gpu_memory", {"level": "critical"}, "critical"),
        ("host_headroom", "host_memory", {"level": "critical"}, "critical"),
    ],
)
def test_severities(kind, family, values, severity):
    assert told(stored(kind, family, values=values)).severity == severity


@pytest.mark.parametrize(
    ("cause", "severity"),
    [
        ("shutdown_requested", "info"),
        ("request_too_long", "info"),
        ("killed_by_orchestrator", "critical"),
        ("killed_by_signal", "critical"),
        ("bad_arguments", "critical"),
        ("illegal_memory_access", "critical"),
    ],
)
def test_an_engine_that_does_not_serve_is_critical_unless_nobody_need_act(cause, severity):
    assert told(stored(diagnosis=failure(cls="not_oom", cause=cause))).severity == severity


@pytest.mark.parametrize("cause", CAUSES["not_oom"])
def test_a_second_diagnosis_does_not_make_a_failure_less_of_one(cause):
    before, after = told(stored()), told(stored(diagnosis=failure(cls="not_oom", cause=cause)))
    assert before.severity == "critical"
    calm = {"shutdown_requested", "bounded_warmup_growth", "request_too_long", "lora_slot_queue"}
    assert after.severity == ("info" if cause in calm else "critical")


LOOP = Trigger("restart_loop", AT + 60, "chat-70b", values={"starts": 11, "window_seconds": 900.0})


@pytest.mark.parametrize(
    ("lang", "says"),
    [
        ("en", "It was started 11 times in 15 min and fails each time. "),
        ("zh", "引擎在 15 分钟内启动了 11 次，每次都失败。"),
    ],
)
def test_an_engine_that_is_started_again_and_again_is_told_as_such(lang, says):
    incident = stored(diagnosis=failure(cls="not_oom", cause="shutdown_requested"))
    looping = dataclasses.replace(incident, triggers=(*incident.triggers, LOOP))
    notice = told(looping, lang=lang)
    assert notice.why.startswith(says)
    assert (notice.restarts, notice.severity) == (11, "critical")
    assert told(incident).restarts is None
    assert json.loads(change_of(notice))["restarts"]


def test_a_risk_is_told_with_its_time():
    notice = told(stored("kv_saturation", "kv_pressure", pressure()))
    assert (notice.severity, notice.cause, notice.eta_seconds) == ("warning", "kv_saturation", 600)
    assert notice.gpus == (3,)

    forecast = stored("forecast_gpu", "gpu_memory", values={"eta_seconds": 120.0}, gpu=2)
    assert told(forecast).eta_seconds == 120
    assert (
        told(stored("forecast_gpu", "x", values={"eta_seconds": float("inf")})).eta_seconds is None
    )


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("kind", TriggerKind.__args__)
def test_before_there_is_a_diagnosis_what_set_it_off_speaks(kind, lang):
    notice = told(stored(kind, text="what was seen"), lang=lang)
    assert len(notice.headline) > 4
    assert notice.headline.isascii() == (lang == "en")
    assert notice.why == "what was seen"
    assert notice.cause is None
    assert notice.remedies == ()


def test_chinese_titles_with_the_numbers_of_the_rule():
    notice = told(stored(diagnosis=failure()), lang="zh")
    assert notice.headline == title("prefill_activation_peak", "zh")
    assert "3.1 GiB asked" in notice.why
    assert not notice.why.isascii()
    assert notice.memory.startswith("GPU 1 (80.0 GiB)：KV 缓存")
    assert notice.remedies[1].action == "去掉 --swap-space"


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("", None),
        ("https://x.example/runbooks/", "https://x.example/runbooks/prefill_activation_peak"),
        ("https://x.example/{cause}.md#top", "https://x.example/prefill_activation_peak.md#top"),
    ],
)
def test_the_runbook(base, url):
    assert told(stored(diagnosis=failure()), runbook_base=base).runbook_url == url
    assert told(stored(), runbook_base=base).runbook_url is None


@pytest.mark.parametrize(
    ("resolution", "says"),
    [
        ({"command_changed": True, "restarted": True}, "other flags"),
        ({"command_changed": False, "restarted": True}, "same flags"),
        ({"command_changed": False}, "same flags"),  # stored before it was noted
        ({"command_changed": False, "restarted": False}, "was not restarted"),
    ],
)
def test_how_it_ended(resolution, says):
    incident = stored(diagnosis=failure(), state="closed", closed_at=AT + 60)
    incident = dataclasses.replace(
        incident, diagnosis={**incident.diagnosis, "resolution": resolution}
    )
    assert says in told(incident).resolution
    still_open = dataclasses.replace(incident, state="open", closed_at=None)
    assert told(still_open).resolution is None


def test_a_notice_survives_the_store():
    notice = Notice("msg_1", "opened", AT, (told(stored(diagnosis=failure())),), "note")
    assert notice_from_json(json.loads(json.dumps(notice_to_json(notice)))) == notice


def test_a_diagnosis_of_another_version_is_no_reason_to_say_nothing():
    odd = {"verdict": "oom", "incidents": [{"cause": "from_the_future", "remedies": [7, {}]}]}
    notice = told(dataclasses.replace(stored(), diagnosis=odd))
    assert notice.cause == "from_the_future"
    assert told(dataclasses.replace(stored(), diagnosis={})).headline
    assert told(dataclasses.replace(stored(), triggers=(), diagnosis=None)).headline


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_set_it_off_may_be_of_another_version(lang):
    odd = Trigger("from_the_future", AT, "chat-70b", text="it ran out")
    notice = told(dataclasses.replace(stored(), triggers=(odd,), diagnosis=None), lang=lang)
    assert notice.headline
    assert notice.why == "it ran out"


def test_a_diagnosis_that_cannot_be_told_leaves_what_set_it_off(caplog):
    odd = {"verdict": "oom", "incidents": [{"cause": "x", "memory": [{"gpu": {}}]}]}
    incident = dataclasses.replace(stored(), diagnosis=odd)
    assert told(incident) == told(dataclasses.replace(incident, diagnosis=None))
    assert incident.id in caplog.text


def test_prompts_and_keys_do_not_get_into_a_message():
    evidence = (
        Evidence("log", "a.log:1", AT, f"Received request r1: prompt: '{PROMPT}', params: x"),
        Evidence("log", "a.log:2", AT, f"failed on prompt='{PROMPT}' with --api-key sk-{'a' * 30}"),
        Evidence("log", "a.log:3", AT, "x" * 1_000_000),
    )
    incident = stored(diagnosis=failure(evidence=evidence, summary=f"prompt: '{PROMPT}'"))
    said = repr(told(incident))
    assert "grandmother" not in said
    assert "sk-aaa" not in said
    assert len(said) < 6_000
