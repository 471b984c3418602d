"""Small facts of a Diagnosis as short text, shared by the renderers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from oomwatch.causes import HOST_CAUSES
from oomwatch.records import (
    Diagnosis,
    Effect,
    EngineFacts,
    Evidence,
    Finding,
    Gpu,
    Incident,
    Remedy,
    Risk,
)
from oomwatch.report.locale import Language, phrase_book
from oomwatch.report.sanitize import clean
from oomwatch.selection import set_together
from oomwatch.units import format_bytes, format_count, format_duration, format_share

_NARROW: Final = 0.02
"""Share of a predicted count below which its range is not worth reading."""
_NOT_VALIDATED: Final = " Not validated: "
"""What stands between a remedy's reason and the doubt about its flags."""
_ENGINE_NAMES: Final = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tgi": "TGI",
    "lmdeploy": "LMDeploy",
    "ollama": "Ollama",
    "pytorch": "PyTorch",
    "tensorrt-llm": "TensorRT-LLM",
}


def headline_word(verdict: str, finding: Finding | None, texts: Mapping[str, str]) -> str:
    """The verdict as the first words above a finding, fit for that finding.

    A server that ran out of memory and then failed for another reason is one ``oom``; the later
    failure is not to be headed by it.
    """
    return texts[f"verdict.{headed(verdict, finding)}"]


def headed(verdict: str, finding: Finding | None) -> str:
    """The verdict that heads a finding: the diagnosis' own, ``not_oom``, or ``oom.host``."""
    if verdict != "oom" or finding is None:
        return verdict
    if finding.cls == "not_oom":
        return "not_oom"
    return "oom.host" if finding.cause in HOST_CAUSES else "oom"


def memory_behind(diagnosis: Diagnosis) -> Incident | None:
    """The newest memory incident, where a later failure of another kind stands before it."""
    incidents = diagnosis.incidents
    if not incidents or incidents[0].finding.cls != "not_oom" or diagnosis.verdict != "oom":
        return None
    return next((i for i in incidents if i.finding.cls != "not_oom"), None)


def engine_of(diagnosis: Diagnosis, finding: Finding) -> EngineFacts | None:
    """The engine a finding is about, if it is named or there is only one."""
    for engine in diagnosis.engines:
        if engine.id == finding.engine_id:
            return engine
    return diagnosis.engines[0] if len(diagnosis.engines) == 1 else None


def finding_facts(
    finding: Finding, engine: EngineFacts | None, texts: Mapping[str, str]
) -> list[str]:
    """The line under the verdict: cause, class, certainty, engine, model, time.

    Where no engine is known, nothing is said that was so while it served: nothing serves in it.
    """
    while_serving = finding.cls in ("long_context", "irregular")
    facts = [
        finding.cause,
        "" if while_serving and engine is None else texts[f"class.{finding.cls}"],
        texts["confidence"].format(percent=round(100 * finding.confidence)),
        engine_name(engine) if engine else "",
        clean(engine.model or "", 60) if engine else "",
        local_time(finding.at) if finding.at is not None else "",
    ]
    return [fact for fact in facts if fact]


def risk_facts(risk: Risk, texts: Mapping[str, str]) -> list[str]:
    """The GPU of a risk, and how long there is."""
    facts = [] if risk.gpu is None else [f"GPU {risk.gpu}"]
    if risk.eta_seconds is not None and math.isfinite(risk.eta_seconds):
        facts.append(texts["eta"].format(duration=format_duration(risk.eta_seconds)))
    return facts


def engine_name(engine: EngineFacts) -> str:
    """``vLLM 0.11.0``, ``vllm-ascend``, or its id where the engine is unknown."""
    name = engine.fork or _ENGINE_NAMES.get(engine.engine or "", engine.engine) or engine.id
    return clean(f"{name} {engine.version}" if engine.version else name, 60)


def engine_line(engine: EngineFacts, texts: Mapping[str, str]) -> str:
    """One engine in one line: name, model, phase, KV cache, and the load of a running one."""
    facts = [engine_name(engine), clean(engine.model or "", 80), texts[f"phase.{engine.phase}"]]
    if engine.kv_tokens is not None:
        facts.append(texts["kv_tokens"].format(tokens=format_count(engine.kv_tokens)))
    facts += _load(engine, texts)
    return " · ".join(fact for fact in facts if fact)


def _load(engine: EngineFacts, texts: Mapping[str, str]) -> list[str]:
    load, facts = engine.load, []
    if load is None:
        return []
    if load.kv_usage_ratio is not None and math.isfinite(load.kv_usage_ratio):
        facts.append(texts["load.kv"].format(share=format_share(load.kv_usage_ratio)))
    if load.running is not None:
        counts = {"running": f"{load.running:.0f}", "waiting": f"{load.waiting or 0:.0f}"}
        facts.append(texts["load.requests"].format_map(counts))
    if load.preemptions_total:
        facts.append(texts["load.preemptions"].format(count=f"{load.preemptions_total:,.0f}"))
    return facts


def gpu_row(gpu: Gpu, texts: Mapping[str, str]) -> tuple[str, str]:
    """A GPU's label, and what is used of it."""
    label = "GPU" if gpu.index is None else f"GPU {gpu.index}"
    facts = [clean(gpu.name or "", 60)]
    if gpu.used_bytes is not None and gpu.total_bytes is not None:
        used, total = format_bytes(gpu.used_bytes), format_bytes(gpu.total_bytes)
        facts.append(texts["in_use"].format(used=used, total=total))
    elif gpu.total_bytes is not None:
        facts.append(texts["total"].format(total=format_bytes(gpu.total_bytes)))
    return label, " · ".join(fact for fact in facts if fact) or texts["no_total"]


def local_time(at: float) -> str:
    """Epoch seconds in the host's time zone, which is named; empty for impossible times."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return ""


def where(item: Evidence) -> str:
    """Where a claim stands: file:line, a metric, a flag, or the kind of reading and its object."""
    place = clean(item.where, 200)
    if item.source in ("nvml", "process") and place.isdecimal():
        return f"PID {place}"
    return place


def statement(item: Evidence, limit: int) -> str:
    """What stands there: the quoted text, the value with its unit, or both for readings."""
    text = clean(item.text or "", limit)
    value = reading(item)
    if not text or not value:
        return text or value
    quoted = item.source in ("log", "kernel") or value in text
    if item.unit == "ratio" and isinstance(item.value, float):
        quoted = quoted or format_share(item.value) in text
    return text if quoted else f"{text} ({value})"


def reading(item: Evidence) -> str:
    """A value for people: bytes as GiB, ratios as percent; empty where there is none."""
    value, unit = item.value, clean(item.unit or "", 30)
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return clean(f"{value} {unit}", 200)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("bytes/s", "bytes/second", "bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if unit == "seconds":
        return format_duration(value)
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{shown} {unit}".rstrip()


def effects(item: Effect | None, texts: Mapping[str, str]) -> list[str]:
    """What a remedy is predicted to change, before → after; what stays the same is left out."""
    if item is None:
        return []
    facts = []
    if item.kv_tokens_after not in (None, item.kv_tokens_before):
        before = format_count(item.kv_tokens_before)
        after = _expected(item)
        facts.append(texts["effect.tokens"].format(before=before, after=after))
    if item.max_concurrency_after not in (None, item.max_concurrency_before):
        before = _times(item.max_concurrency_before)
        after = _times(item.max_concurrency_after)
        facts.append(texts["effect.concurrency"].format(before=before, after=after))
    if item.freed_bytes:
        facts.append(texts[_where_to(item)].format(size=format_bytes(item.freed_bytes)))
    return facts


def _where_to(item: Effect) -> str:
    """Whether freed memory goes to the KV cache at the next start, or stays outside it."""
    before, after = item.kv_tokens_before, item.kv_tokens_after
    if before is None or after is None or before == after:
        return "effect.freed"
    return "effect.to_kv" if after > before else "effect.left"


def printed_steps(remedies: Sequence[Remedy], printer: str, texts: Mapping[str, str]) -> str:
    """That the steps are alternatives, and which of them `printer` prints."""
    chosen = {id(remedy) for remedy in set_together(remedies)}
    steps = [str(rank) for rank, remedy in enumerate(remedies, 1) if id(remedy) in chosen]
    if not steps:
        return texts["several"]
    key = "several.one" if len(steps) == 1 else "several.together"
    if any(remedies[int(step) - 1].enough for step in steps):
        key = "several.enough"  # chosen as the first that is
    flags = any(remedy.set or remedy.unset for remedy in remedies if id(remedy) in chosen)
    if not flags:
        printer = _for_variables(printer)
    elif printer.startswith("--") and any(r.env for r in remedies if id(r) in chosen):
        printer += texts["printer.env"]
    last = texts["and"].join(filter(None, (texts["comma"].join(steps[:-1]), steps[-1])))
    return texts[key].format(printer=printer, steps=last)


def _for_variables(printer: str) -> str:
    """What prints variables alone: where there is no command to put them before, no flags do."""
    if printer.endswith("`"):
        return f"{printer[:-1]} --format env`"
    return printer.replace("--format args", "--format env")


def reason(remedy: Remedy) -> str:
    """Why a remedy helps, without what is said of its flags: `validity` says that."""
    return remedy.why.partition(_NOT_VALIDATED)[0]


def remedy_in(remedy: Remedy, lang: Language) -> Remedy:
    """A remedy with its sentences in a language, as far as it has them."""
    if lang == "en":
        return remedy
    say = phrase_book(lang).say
    doubt = remedy.why.partition(_NOT_VALIDATED)[2].removesuffix(".")
    return dataclasses.replace(
        remedy,
        title=say(remedy.title),
        action=None if remedy.action is None else say(remedy.action),
        cost=say(remedy.cost),
        why=say(reason(remedy)) + (f"{_NOT_VALIDATED}{say(doubt)}." if doubt else ""),
    )


def left_in_english(remedy: Remedy, lang: Language) -> list[str]:
    """The sentences of a remedy that a language does not have: none, where nothing is missing."""
    doubt = remedy.why.partition(_NOT_VALIDATED)[2].removesuffix(".")
    said = (remedy.title, remedy.action, remedy.cost, reason(remedy), doubt)
    return [text for text in said if text and not phrase_book(lang).has(text)]


def _expected(item: Effect) -> str:
    """The tokens after a remedy; a range where the prediction is wide."""
    middle, low, high = item.kv_tokens_after, item.kv_tokens_after_low, item.kv_tokens_after_high
    if not middle or low is None or high is None or high - low <= _NARROW * middle:
        return format_count(middle)
    step = 10 ** max(0, len(str(high)) - 3)
    return f"{format_count(low // step * step)}–{format_count(-(-high // step) * step)}"


def validity(remedy: Remedy, texts: Mapping[str, str], *, verbose: bool) -> str:
    """That a remedy's flags were not checked; what they were checked for if `verbose`."""
    if not (remedy.set or remedy.unset) or (remedy.validated and not verbose):
        return ""
    engine = clean(remedy.valid_for or "", 200)
    if remedy.validated:
        return texts["valid_for"].format(engine=engine) if engine else ""
    said = texts["unchecked.engine"].format(engine=engine) if engine else texts["unchecked"]
    doubt = clean(remedy.why.partition(_NOT_VALIDATED)[2], 300).removesuffix(".")
    return said + texts["colon"] + doubt if doubt else said


def _times(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}".removesuffix("0").removesuffix(".0")
