from __future__ import annotations

import dataclasses
import re

import pytest
from golden_files import check_golden
from report_samples import (
    SAMPLES,
    at_risk,
    host_oom_kill,
    kv_lt_max_len,
    not_oom,
    prefill_peak,
    restart_loop,
    undecided,
)
from rich.cells import cell_len

from oomwatch.records import Evidence, Remedy
from oomwatch.report.html import render_html
from oomwatch.report.markdown import render_markdown
from oomwatch.report.text import render_text


@pytest.mark.parametrize("name", SAMPLES)
def test_matches_its_golden_file(name: str) -> None:
    check_golden(f"{name}.txt", render_text(SAMPLES[name]()))


@pytest.mark.parametrize("name", ["kv_lt_max_len", "prefill_peak", "healthy", "undecided"])
def test_matches_its_golden_file_in_chinese(name: str) -> None:
    check_golden(f"{name}.zh.txt", render_text(SAMPLES[name](), lang="zh"))


def test_matches_its_golden_file_verbose() -> None:
    check_golden("prefill_peak.verbose.txt", render_text(prefill_peak(), verbose=True))


def test_matches_its_golden_file_quiet() -> None:
    check_golden("prefill_peak.quiet.txt", render_text(prefill_peak(), quiet=True))


def test_matches_its_golden_file_in_colour() -> None:
    check_golden("prefill_peak.ansi", render_text(prefill_peak(), color=True, width=100))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_stays_within_the_width(name: str, lang: str, width: int) -> None:
    text = render_text(SAMPLES[name](), width=width, lang=lang, verbose=True)
    # a single flag is never broken, whatever its length
    lines = [line for line in text.splitlines() if "compilation-config" not in line]
    assert [line for line in lines if cell_len(line) > width] == []
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "\n\n\n" not in text


@pytest.mark.parametrize("name", SAMPLES)
def test_colour_adds_nothing_but_colour(name: str) -> None:
    text = render_text(SAMPLES[name](), color=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in bare
    assert all(char.isprintable() or char == "\n" for char in bare)


def test_the_verdict_is_the_first_line_and_the_sentence_near() -> None:
    lines = render_text(kv_lt_max_len()).splitlines()
    assert lines[0].startswith("OUT OF MEMORY: ")
    assert "16.0 GiB" in "\n".join(lines[:5])


def test_a_restart_loop_is_one_incident_with_its_count() -> None:
    text = render_text(restart_loop())
    assert "14 times" in text
    assert text.count("What to do") == 1
    assert "times" not in render_text(kv_lt_max_len()).split("Evidence")[0]


def test_earlier_incidents_take_a_line_each_unless_verbose() -> None:
    short, long = render_text(prefill_peak()), render_text(prefill_peak(), verbose=True)
    assert "Earlier incidents" in short
    assert "server-0.log:902" not in short
    assert "server-0.log:902" in long


def test_sources_stand_there_only_if_one_failed_or_asked_for() -> None:
    assert "Sources" not in render_text(kv_lt_max_len())
    assert "Sources" in render_text(kv_lt_max_len(), verbose=True)
    failed = render_text(prefill_peak())
    assert "connection refused" in failed
    assert "systemd-journal" not in failed
    assert "systemd-journal" in render_text(prefill_peak(), verbose=True)


def test_what_could_not_be_read_is_said_when_nothing_decides() -> None:
    assert "nvml: no NVIDIA driver" in render_text(undecided())


def test_less_likely_causes_show_when_unsure() -> None:
    sure = kv_lt_max_len()
    finding = dataclasses.replace(sure.incidents[0].finding, confidence=0.5)
    unsure = dataclasses.replace(
        sure, incidents=(dataclasses.replace(sure.incidents[0], finding=finding),)
    )
    assert "Less likely" not in render_text(sure)
    assert "kv_no_blocks (10 %)" in render_text(unsure)


def test_flags_can_be_pasted() -> None:
    text = render_text(kv_lt_max_len())
    assert """--compilation-config '{"cudagraph_capture_sizes":[1,2,4,8,16]}' \\\n""" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert "remove  --swap-space" in text


def test_an_unchecked_flag_says_so() -> None:
    diagnosis = kv_lt_max_len()
    reason = Remedy("r", "t", "more_kv", "w", "c", set={"--x": "1"}, valid_for="vllm 0.11.0")
    incident = dataclasses.replace(diagnosis.incidents[0], remedies=(reason,))
    text = render_text(dataclasses.replace(diagnosis, incidents=(incident,)))
    assert "not verified for vllm 0.11.0" in text


def test_long_lists_are_cut_and_say_so() -> None:
    diagnosis = kv_lt_max_len()
    many = tuple(Evidence("log", f"server.log:{n}", None, f"line {n}") for n in range(20))
    finding = dataclasses.replace(diagnosis.incidents[0].finding, evidence=many)
    incident = dataclasses.replace(diagnosis.incidents[0], finding=finding)
    diagnosis = dataclasses.replace(diagnosis, incidents=(incident,))
    assert "14 more with -v" in render_text(diagnosis)
    assert "line 19" in render_text(diagnosis, verbose=True)


def test_a_quoted_line_of_megabytes_is_cut() -> None:
    diagnosis = kv_lt_max_len()
    huge = (Evidence("log", "server.log:1", None, "x" * 5_000_000),)
    finding = dataclasses.replace(diagnosis.incidents[0].finding, evidence=huge)
    incident = dataclasses.replace(diagnosis.incidents[0], finding=finding)
    diagnosis = dataclasses.replace(diagnosis, incidents=(incident,))
    assert len(render_text(diagnosis, verbose=True)) < 10_000


def test_a_risk_says_how_long_there_is() -> None:
    text = render_text(at_risk())
    assert text.startswith("AT RISK: ")
    assert "full in about 3.5 h" in text
    assert "kv_saturation" in text


def test_a_later_failure_is_not_headed_by_the_memory_that_ran_out_before() -> None:
    refused, failed = kv_lt_max_len(), not_oom()
    both = dataclasses.replace(refused, incidents=(*failed.incidents, *refused.incidents))
    later, before = failed.incidents[0], refused.incidents[0]
    for quiet in (False, True):
        lines = render_text(both, quiet=quiet).splitlines()
        assert lines[0].startswith("NOT A MEMORY FAILURE: ")
        assert lines[1].startswith(later.finding.cause)
        (second,) = (n for n, line in enumerate(lines) if line.startswith("OUT OF MEMORY: "))
        assert lines[second + 1].startswith(before.finding.cause)
        assert any(before.remedies[0].title in line for line in lines[second:])
    assert "Earlier incidents" not in render_text(both)
    assert render_text(both, verbose=True).count("OUT OF MEMORY: ") == 1
    markdown = render_markdown(both)
    assert markdown.startswith("## NOT A MEMORY FAILURE: ")
    assert "\n## OUT OF MEMORY: " in markdown
    page = render_html(both)
    assert ">NOT A MEMORY FAILURE: " in page
    assert ">OUT OF MEMORY: " in page


def test_chinese_says_which_memory_ran_out() -> None:
    assert render_text(kv_lt_max_len(), lang="zh").startswith("显存不足（OOM）：")
    assert render_text(host_oom_kill(), lang="zh").startswith("主机内存不足（OOM）：")
