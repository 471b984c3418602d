"""The memory model of the engine that a finding is about, for effects, amounts and refusals.

`forecast_of` answers None where the model's sizes are not known here, or where what the log printed
contradicts them: then remedies fall back on proportions of the log's own figures.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomwatch.engines.flags import as_number
from oomwatch.records import EngineFacts, Finding
from oomwatch.units import format_bytes

if TYPE_CHECKING:
    from oomwatch.memory.engine_facts import Prediction
    from oomwatch.memory.planner import Plan, PlanInput

_NEAR: Final = 0.03
"""Printed and predicted figures of the same layout agree within rounding; more is another model."""
_NEAR_WEIGHTS: Final = 0.15
_FROM_LOG: Final = ("--max-num-batched-tokens", "--gpu-memory-utilization", "--mem-fraction-static")
"""Settings that logs print apart from the arguments."""


class Forecast:
    """What changed flags would do to one engine; each change is planned once."""

    def __init__(self, given: PlanInput, now: Plan) -> None:
        self.given = given
        self.now = now
        self._known: dict[str, Prediction | None] = {}

    @property
    def needed_bytes(self) -> int:
        """KV memory of one request of full length, on each GPU."""
        return self.now.bytes_per_request

    @property
    def pool_bytes(self) -> int:
        """KV memory there is, on each GPU; negative where the shares do not fit."""
        return self.now.kv_available_bytes

    @property
    def total_bytes(self) -> int:
        """Total of the card, given or inferred."""
        return self.given.device.total_bytes

    def least_share(self) -> float | None:
        """The smallest share that still holds one request of full length; None where pinned."""
        if self.now.settings.kv_cache_memory_bytes or self.now.settings.blocks_override:
            return None
        spare = self.now.kv_low_bytes - self.now.bytes_per_request
        return (self.now.budget.requested_bytes - spare) / self.now.budget.total_bytes

    def longest(self) -> int:
        """The longest request that the pool holds for sure; 0 where none."""
        layout = self.now.layout
        return layout.longest(layout.blocks(self.now.kv_low_bytes), self.given.model.max_model_len)

    def ranks_that_start(self, flag: str, ranks: Sequence[int]) -> int | None:
        """The first of these numbers of ranks with which the server starts."""
        for number in ranks:
            found = self.of({flag: number})
            if found is not None and found.after.fits:
                return number
        return None

    def graph_bytes(self, changes: Mapping[str, Any] | None = None) -> int | None:
        """What all CUDA graphs are expected to take, also where the card does not hold them."""
        from oomwatch.errors import OomwatchError  # noqa: PLC0415 - as below
        from oomwatch.memory.budget import graph_term  # noqa: PLC0415 - as below
        from oomwatch.memory.planner import change, plan  # noqa: PLC0415 - only with a known model

        written = {flag: _written(value) for flag, value in (changes or {}).items()}
        try:
            settings = plan(change(self.given, written)).settings
        except OomwatchError:
            return None
        return graph_term(self.given.model, settings).bytes

    def splits(self, ranks: int) -> bool:
        """Whether the model's attention heads divide by this number of ranks."""
        heads = (getattr(layer.mixer, "heads", 1) for layer in self.given.model.attention_layers)
        return all(number % ranks == 0 for number in heads)

    def of(self, changes: Mapping[str, Any], unset: tuple[str, ...] = ()) -> Prediction | None:
        """The prediction for flags by canonical name; None where the model cannot plan them."""
        from oomwatch.memory.engine_facts import predict  # noqa: PLC0415 - only with a known model

        written = {flag: _written(value) for flag, value in changes.items()}
        key = repr((sorted(written.items()), unset))
        if key not in self._known:
            self._known[key] = predict(self.given, written, unset)
        return self._known[key]


def forecast_of(finding: Finding, engine: EngineFacts) -> Forecast | None:
    """The memory model of an engine; None where its model, card or version are not known."""
    if engine.engine not in ("vllm", "sglang") or engine.fork is not None:
        return None
    if not (engine.model_config or engine.model) or engine.version is None:
        return None
    from oomwatch.errors import OomwatchError  # noqa: PLC0415 - as the next two
    from oomwatch.memory.engine_facts import plan_input  # noqa: PLC0415 - only with a known model
    from oomwatch.memory.planner import plan  # noqa: PLC0415 - only with a known model

    given = plan_input(_with_finding(finding, engine), gpu_name=engine.gpu_name)
    if given is None:
        return None
    try:
        now = plan(given)
        contradicted = _contradicts(finding, engine, given, now)
    except OomwatchError:
        return None
    return None if contradicted else Forecast(given, now)


def model_source(engine: EngineFacts) -> str | None:
    """Where the sizes of an engine's model are from; None where they are not known."""
    if engine.engine not in ("vllm", "sglang") or engine.fork is not None:
        return None
    if not (engine.model_config or engine.model):
        return None
    from oomwatch.memory.engine_facts import (  # noqa: PLC0415 - only when asked
        INFERRED,
        known_model,
        plan_input,
    )

    found = known_model(engine)
    if found is None:
        return None
    given = plan_input(engine, model=found.model, gpu_name=engine.gpu_name)
    source = found.note or found.where
    if given is not None and given.device.name == INFERRED:
        size = format_bytes(given.device.total_bytes)
        source += f"; a card of about {size}, by the shares that the log prints"
    return source


def _with_finding(finding: Finding, engine: EngineFacts) -> EngineFacts:
    """The facts, with what the failed check printed and what the log says is in force."""
    arguments = dict(engine.arguments)
    for flag in _FROM_LOG:
        if flag in engine.in_force:
            arguments.setdefault(flag, engine.in_force[flag])
    kv_bytes, total = engine.kv_bytes, engine.total_bytes
    if kv_bytes is None:
        kv_bytes = _whole(finding.values.get("available_kv_bytes"))
    if total is None:
        total = _whole(finding.values.get("total_bytes"))
    return dataclasses.replace(engine, arguments=arguments, kv_bytes=kv_bytes, total_bytes=total)


def _contradicts(finding: Finding, engine: EngineFacts, given: PlanInput, now: Plan) -> bool:
    """Whether the log's figures and the model's sizes cannot be of the same server."""
    from oomwatch.memory.planner import plan, without_facts  # noqa: PLC0415 - only then

    needed = as_number(finding.values.get("needed_kv_bytes"))
    if needed and abs(needed - now.bytes_per_request) > _NEAR * needed + 2**27:
        return True
    if engine.kv_tokens and engine.kv_bytes and "--num-gpu-blocks-override" not in given.arguments:
        near = _NEAR * engine.kv_tokens + 64
        if min(abs(engine.kv_tokens - n) for n in (now.tokens, now.line_tokens)) > near:
            return True
    if engine.weights_bytes:
        bare = plan(without_facts(given, ("--quantization",))).budget.weights.bytes
        return abs(bare - engine.weights_bytes) > _NEAR_WEIGHTS * engine.weights_bytes
    return False


def _whole(value: Any) -> int | None:
    number = as_number(value)
    return None if number is None or not abs(number) < 2**62 else int(number)


def _written(value: Any) -> Any:
    """A value as a command line has it."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return value if isinstance(value, bool | str) else str(value)


def known_formats(engine: EngineFacts, forecast: Forecast | None) -> frozenset[str] | None:
    """KV cache formats that this release runs on this card for this model; None where unknown."""
    from oomwatch.engines.versions import release  # noqa: PLC0415 - only with a known model

    if forecast is None or forecast.given.device.compute_capability is None:
        return None
    at = release(engine.version)
    if engine.engine != "vllm" or at is None:
        return None
    from oomwatch.memory.data.kv_formats import KV_FORMATS  # noqa: PLC0415 - as above
    from oomwatch.memory.kv_formats import unsupported  # noqa: PLC0415 - as above

    given, v0 = forecast.given, forecast.now.settings.v0
    return frozenset(
        fmt.name
        for fmt in KV_FORMATS
        if unsupported(fmt, at, given.device, given.model, v0=v0) is None
    )


def only_flashinfer(engine: EngineFacts, forecast: Forecast | None) -> bool:
    """Whether this card reads FP8 only by a backend that may be missing; True where unknown."""
    from oomwatch.engines.versions import release  # noqa: PLC0415 - only with a known model

    if known_formats(engine, forecast) is None or forecast is None:
        return True
    from oomwatch.memory.kv_formats import caveat, find_format  # noqa: PLC0415 - as above

    fp8, at = find_format("fp8"), release(engine.version)
    given = forecast.given
    return fp8 is None or at is None or bool(caveat(fp8, at, given.device, given.model))
