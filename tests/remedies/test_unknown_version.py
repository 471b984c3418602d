"""Without a version, what the log shows bounds it: no flag is offered that none of those releases has."""

from __future__ import annotations

import dataclasses

import pytest

from oomwatch.causes import CAUSES, class_of
from oomwatch.engines import versions
from oomwatch.engines.flags import check_flag
from oomwatch.records import EngineFacts, Evidence, Finding
from oomwatch.remedies.catalog import prescribe

ALL_CAUSES = [cause for causes in CAUSES.values() for cause in causes]


def finding(cause: str) -> Finding:
    return Finding(
        cls=class_of(cause), cause=cause, confidence=0.9, summary="It failed.", evidence=()
    )


@pytest.mark.parametrize(
    ("name", "since", "until", "generation"),
    [
        ("vllm", None, "0.4.2", "V0"),
        ("vllm", "0.6.5", "0.10.2", "V0"),
        ("vllm", "0.8.0", "0.8.5", "V1"),
        ("vllm", "0.28.0", None, "V1"),
        ("sglang", None, "0.2.14", None),
        ("sglang", "0.5.17", None, None),
    ],
)
def test_every_flag_is_one_of_some_release_in_the_span(name, since, until, generation):
    releases = [".".join(map(str, at)) for at in versions.between(name, since, until)]
    facts = EngineFacts(
        id="e", engine=name, version_since=since, version_until=until, generation=generation
    )
    checked = 0
    for cause in ALL_CAUSES:
        for remedy in prescribe(finding(cause), facts):
            assert not remedy.set or not remedy.validated
            for flag, value in remedy.set.items():
                checked += 1
                assert any(check_flag(name, at, flag, value) is None for at in releases), flag
    assert checked > 20


@pytest.mark.parametrize(
    ("version", "until", "offered"),
    [
        (None, None, {"--max-cudagraph-capture-size"}),
        (None, "0.6.4", set()),
        (None, "0.8.5", {"--compilation-config"}),
        (None, "0.10.2", {"--compilation-config"}),
        ("0.9.2", None, {"--compilation-config"}),
        ("0.6.3", None, set()),
    ],
)
def test_graphs_of_v0_follow_the_setting_that_it_reads(version, until, offered):
    generation = "V0" if version or until else None
    facts = EngineFacts(
        id="e", engine="vllm", version=version, version_until=until, generation=generation
    )
    remedies = prescribe(finding("cuda_graph_capture"), facts)
    assert {f for r in remedies if r.id == "fewer-graphs" for f in r.set} == offered


def test_steps_that_a_release_before_the_span_needed_are_not_offered():
    old = EngineFacts(id="e", engine="vllm", version_until="0.4.0", generation="V0")
    flags = {flag for r in prescribe(finding("kv_saturation"), old) for flag in r.set}
    assert "--kv-cache-dtype" in flags
    assert {r.set.get("--kv-cache-dtype") for r in prescribe(finding("kv_saturation"), old)} <= {
        None,
        "fp8_e5m2",
    }


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("2. set --cuda-graph-max-bs to a smaller value (e.g., 16)", "--cuda-graph-max-bs"),
        ("2. set --cuda-graph-max-bs-decode to a smaller value", "--cuda-graph-max-bs-decode"),
        ("CUDA out of memory", "--cuda-graph-max-bs-decode"),
    ],
)
def test_an_option_is_spelled_as_the_message_spells_it(text, flag):
    said = (Evidence(source="log", where="a.log:1", text=text),)
    capture = dataclasses.replace(finding("cuda_graph_capture"), evidence=said)
    remedies = prescribe(capture, EngineFacts(id="e", engine="sglang"))
    assert [list(r.set) for r in remedies if r.id == "fewer-graphs"] == [[flag]]
