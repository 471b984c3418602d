from __future__ import annotations

import dataclasses

import pytest
from notice_samples import FLAGS, INCIDENT, KINDS, SECOND, notice

from oomwatch.notify.text import DETAILS, fit, place, subject, text_body, worst


@pytest.mark.parametrize(
    ("kind", "en", "zh"),
    [
        ("opened", "[CRITICAL] A long", "【严重】A long"),
        ("updated", "[UPDATE] A long", "【更新】A long"),
        ("resolved", "[RESOLVED] A long", "【已恢复】A long"),
        ("escalated", "[CRITICAL, UNACKNOWLEDGED] A long", "【严重，无人确认】A long"),
        ("grouped", "[CRITICAL] 2 incidents on gpu-07", "【严重】gpu-07.example.com 上有 2 起"),
        ("test", "Test message of oomwatch", "oomwatch 测试消息"),
        ("undelivered", "oomwatch could not deliver messages", "oomwatch 有消息未能送达"),
    ],
)
def test_subjects(kind, en, zh):
    assert subject(notice(kind), "en").startswith(en)
    assert subject(notice(kind), "zh").startswith(zh)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [400, 600, 1000, 2048, 4096])
def test_a_body_fits(kind, lang, limit):
    body = fit(notice(kind), lang, limit, lambda text: len(text.encode()))
    assert len(body.encode()) <= limit
    assert body


def test_what_goes_first_where_room_is_short():
    whole = text_body(notice("opened"), "en")
    order = (
        "torch.OutOfMemoryError",
        "frees 2.1 GiB",
        "GPU 0 (79.2 GiB)",
        "(3.1 GiB asked, 640 MiB free).",
    )
    assert all(part in whole for part in order)
    lengths = [max((limit for limit in range(300, len(whole) + 1) if part not in fit(notice("opened", wordy()), "en", limit)), default=0) for part in order]  # fmt: skip
    assert lengths == sorted(lengths, reverse=True)
    for limit in range(420, len(whole), 50):
        body = fit(notice("opened"), "en", limit)
        for part in (FLAGS, INCIDENT.host, "83 % sure", "prefill_activation_peak"):
            assert part in body


def wordy():
    return dataclasses.replace(INCIDENT, why=f"{'w' * 200} (3.1 GiB asked, 640 MiB free).")


def test_a_group_that_does_not_fit_says_how_many_are_left_out():
    many = [dataclasses.replace(INCIDENT, id=f"inc-{number:04}") for number in range(50)]
    body = fit(notice("grouped", *many), "en", 1000)
    listed = body.count("- [CRITICAL]")
    assert 3 < listed < 50
    assert body.endswith(f"and {50 - listed} more: oomwatch incidents")


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [((), None), ((3,), "GPU 3"), ((0, 1), "GPU 0,1"), (tuple(range(8)), "GPU 0-7"), ((0, 1, 5), "GPU 0,1,5")],
)  # fmt: skip
def test_gpus(gpus, shown):
    last = place(dataclasses.replace(INCIDENT, gpus=gpus)).split(" · ")[-1]
    assert last == (shown or "Qwen3-32B")


def test_what_was_not_checked_is_said():
    [first, *_] = INCIDENT.remedies
    doubtful = dataclasses.replace(
        INCIDENT, remedies=(dataclasses.replace(first, validated=False),)
    )
    assert "not checked against the version that runs" in text_body(
        notice("opened", doubtful), "en"
    )
    assert "not checked" not in text_body(notice("opened"), "en")


def test_a_forecast_says_how_long_there_is():
    soon = dataclasses.replace(INCIDENT, eta_seconds=600.0)
    assert "Used up in about: 10 min" in text_body(notice("opened", soon), "en")


def test_without_a_runbook_the_command_that_explains():
    offline = dataclasses.replace(INCIDENT, runbook_url=None)
    assert "oomwatch explain prefill_activation_peak" in text_body(notice("opened", offline), "en")
    assert "--lang zh" in text_body(notice("opened", offline), "zh")


def test_the_worst_of_a_group_is_its_severity():
    assert worst(notice("grouped", SECOND, INCIDENT)) == "critical"
    assert worst(notice("grouped", SECOND)) == "warning"
    over = dataclasses.replace(INCIDENT, closed_at=INCIDENT.opened_at + 60)
    assert worst(notice("grouped", SECOND, over)) == "warning"
    assert subject(notice("grouped", over, over), "en").startswith("[RESOLVED] 2 incidents")
    assert len(DETAILS) > 4
