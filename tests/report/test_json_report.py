from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import jsonschema
import pytest
from golden_files import check_golden
from report_samples import NOW, SAMPLES, kv_lt_max_len, prefill_peak

from oomwatch.causes import CAUSES
from oomwatch.records import Diagnosis, Effect, EngineFacts, Evidence, Remedy
from oomwatch.report.json_report import _effect, flag_value, read_schema, render_json, to_json

# The contract's keys, written out a second time.
KEYS = {
    "answer": "schema oomwatch_version generated_at host verdict engines gpus incidents risks sources",
    "engine": "id engine version model command arguments pids gpus phase kv_tokens",
    "gpu": "index uuid name total_bytes used_bytes free_bytes reserved_bytes",
    "incident": "id at engine class cause confidence summary evidence alternatives memory remedies unseen",
    "evidence": "source where at text value unit",
    "alternative": "class cause confidence why_less_likely",
    "memory": "gpu total_bytes parts",
    "remedy": "rank id title set unset env action direction effect cost why valid_for validated",
    "effect": "kv_tokens_before kv_tokens_after freed_bytes max_concurrency_before max_concurrency_after",
    "risk": "class cause engine gpu eta_seconds confidence evidence remedies",
    "source": "name status detail",
}
ADDED = {
    "answer": {"advice"},
    "engine": {"started_at"},
    "incident": {"count"},
    "risk": {"summary"},
    "remedy": {"enough"},
    "effect": {"kv_tokens_after_low", "kv_tokens_after_high"},
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.protocols.Validator:
    schema = read_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def assert_keys(kind: str, item: dict[str, Any]) -> None:
    assert set(item) == set(KEYS[kind].split()) | ADDED.get(kind, set())


@pytest.mark.parametrize("name", SAMPLES)
def test_every_answer_has_the_contract_form(
    name: str, validator: jsonschema.protocols.Validator
) -> None:
    answer = to_json(SAMPLES[name]())
    validator.validate(answer)
    assert_keys("answer", answer)
    for kind in ("engine", "gpu", "incident", "risk", "source"):
        for item in answer[kind + "s"]:
            assert_keys(kind, item)
    for found in answer["incidents"] + answer["risks"]:
        assert found["cause"] in CAUSES[found["class"]]
        assert [item["rank"] for item in found["remedies"]] == [
            *range(1, len(found["remedies"]) + 1)
        ]
        for item in found["evidence"]:
            assert_keys("evidence", item)
        for item in found["remedies"]:
            assert_keys("remedy", item)
            assert not set(item["set"]) & set(item["unset"])
            if item["effect"]:
                assert_keys("effect", item["effect"])
    for incident in answer["incidents"]:
        assert incident["evidence"]
        assert incident["summary"]
        for item in incident["alternatives"]:
            assert_keys("alternative", item)
        for item in incident["memory"]:
            assert_keys("memory", item)
            assert sum(part["bytes"] for part in item["parts"]) == item["total_bytes"]


@pytest.mark.parametrize("name", SAMPLES)
def test_matches_its_golden_file(name: str) -> None:
    answer = to_json(SAMPLES[name]())
    answer["oomwatch_version"] = "VERSION"
    check_golden(f"{name}.json", json.dumps(answer, ensure_ascii=False, indent=2) + "\n")


def test_rendered_text_is_the_same_object() -> None:
    text = render_json(kv_lt_max_len())
    assert text.endswith("}\n")
    assert json.loads(text) == to_json(kv_lt_max_len())


def test_flags_are_texts_as_typed() -> None:
    assert flag_value(True) is True
    assert flag_value(None) is True
    assert flag_value(64) == "64"
    assert flag_value(0.85) == "0.85"
    assert flag_value({"image": 1, "video": 0}) == '{"image":1,"video":0}'
    assert flag_value("fp8\x1b[0m") == "fp8"


def test_numbers_that_json_lacks_are_unknown() -> None:
    diagnosis = kv_lt_max_len()
    evidence = (Evidence("metrics", "x", math.nan, None, math.inf), Evidence("log", "y", 1e30))
    finding = dataclasses.replace(diagnosis.incidents[0].finding, evidence=evidence, confidence=1.7)
    incident = dataclasses.replace(diagnosis.incidents[0], finding=finding)
    answer = to_json(dataclasses.replace(diagnosis, incidents=(incident,)))
    seen = answer["incidents"][0]
    assert [(e["at"], e["value"]) for e in seen["evidence"]] == [(None, None), (None, None)]
    assert seen["confidence"] == 1


def test_arguments_of_any_kind_become_json() -> None:
    arguments = {"--a": (1, 2.5), "--b": {"k": math.nan}, "--c": None, "--d": {3}, "--e\n": "x\x00"}
    engine = EngineFacts(id="e", arguments=arguments)
    answer = to_json(Diagnosis("healthy", NOW, engines=(engine,)))
    assert answer["engines"][0]["arguments"] == {
        "--a": [1, 2.5],
        "--b": {"k": None},
        "--c": None,
        "--d": [3],
        "--e": "x",
    }
    assert answer["engines"][0]["command"] is None


def test_the_schema_knows_every_cause() -> None:
    pairs = read_schema()["$defs"]["class_and_cause"]["anyOf"]
    listed = {
        pair["properties"]["class"]["const"]: tuple(pair["properties"]["cause"]["enum"])
        for pair in pairs
    }
    assert listed == CAUSES


def _incident(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["incidents"][0]
    return found


BREAKS = {
    "missing key": lambda a: a.pop("host"),
    "added key": lambda a: a.update(extra=1),
    "unknown verdict": lambda a: a.update(verdict="maybe"),
    "cause of another class": lambda a: _incident(a).update({"class": "not_oom"}),
    "unknown cause": lambda a: _incident(a).update(cause="oops"),
    "confidence in percent": lambda a: _incident(a).update(confidence=97),
    "no evidence": lambda a: _incident(a).update(evidence=[]),
    "two-line summary": lambda a: _incident(a).update(summary="a\nb"),
    "time with a space": lambda a: _incident(a).update(at="2026-11-30 01:11:44"),
    "negative part": lambda a: _incident(a)["memory"][0]["parts"][0].update(bytes=-1),
    "remedy that does nothing": lambda a: _incident(a)["remedies"][0].update(set={}),
    "flag value as number": lambda a: _incident(a)["remedies"][0]["set"].update({"--x": 1}),
    "flag without dashes": lambda a: _incident(a)["remedies"][0]["set"].update({"x": "1"}),
    "unknown direction": lambda a: _incident(a)["remedies"][0].update(direction="up"),
    "evidence nowhere": lambda a: _incident(a)["evidence"][0].update(where=""),
    "unknown source status": lambda a: a["sources"][0].update(status="fine"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_schema_refuses(name: str, validator: jsonschema.protocols.Validator) -> None:
    answer = copy.deepcopy(to_json(kv_lt_max_len()))
    BREAKS[name](answer)
    assert not validator.is_valid(answer)


def test_a_remedy_may_be_only_an_action(validator: jsonschema.protocols.Validator) -> None:
    remedy = Remedy("r", "t", "other", "w", "c", action="Do it.")
    diagnosis = prefill_peak()
    incident = dataclasses.replace(diagnosis.incidents[0], remedies=(remedy,))
    validator.validate(to_json(dataclasses.replace(diagnosis, incidents=(incident,))))


def test_an_effect_of_which_nothing_is_known_is_null() -> None:
    assert _effect(Effect()) is None
    assert (_effect(Effect(freed_bytes=0)) or {})["freed_bytes"] == 0
