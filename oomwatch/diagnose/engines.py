"""Who ran, and with what in force: one `EngineFacts` per start, from the log, the command, samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from oomwatch.diagnose.contradictions import other_values
from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.inputs import Inputs, PageInput
from oomwatch.diagnose.release_span import generation_of_code, release_span
from oomwatch.diagnose.runs import Run
from oomwatch.engines import commandline, flags, versions
from oomwatch.engines.patterns import LARGEST
from oomwatch.records import EngineFacts, Phase, RecordedEngine, Series

_BLOCK: Final = 16
"""Tokens of a V0 block unless --block-size says otherwise (vLLM up to 0.10.2)."""
_MEMORY_FLAGS: Final = re.compile(
    r"^--(?:model\b|max-|gpu-memory|kv-cache|swap-space|cpu-offload|enforce-eager|tensor-|pipeline-|data-parallel|"
    r"enable-(?:lora|expert|chunked|prefix)|speculative|num-speculative|quantization|dtype|limit-mm|mem-fraction|"
    r"chunked-prefill|tp-size|pp-size|dp-size|page-size|context-length|cuda-graph|disable-cuda-graph|block-size|"
    r"num-gpu-blocks|num-scheduler-steps|schedule-conservativeness|swa-full|mamba-|hicache|disaggregation)"
)
_BANNERS: Final = (
    "vllm.api_banner",
    "vllm.logo_version",
    "vllm.plain_banner",
    "vllm.engine_banner",
    "sglang.server_args",
)
_FORKS: Final = (
    (re.compile(r"(?i)ascend|\bnpu\b|torch_npu"), "vllm-ascend"),
    (re.compile(r"sgl_jax"), "sgl-jax"),
)
_CONFIGURED: Final = {
    "enforce_eager": "--enforce-eager",
    "kv_cache_dtype": "--kv-cache-dtype",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "tensor_parallel_size": "--tensor-parallel-size",
}
"""Settings that vLLM's engine banner names, where the server's arguments are not printed."""
_REJECTED: Final = re.compile(r"invalid (?:choice|\w+ value):? '?([^'(]{1,120})'?")


def describe_engine(
    identity: str,
    run: Run | None,
    inputs: Inputs,
    recorded: RecordedEngine | None,
    pages: tuple[PageInput, ...],
) -> EngineFacts:
    """The facts of one start; what cannot be told stays None."""
    page = pages[0] if pages else None
    command = _command(inputs, recorded)
    parsed = commandline.parse_command(command, engine=inputs.engine or "auto") if command else None
    engine = (
        inputs.engine or (run.engine if run else None) or (recorded.engine if recorded else None)
    )
    of_another = parsed is not None and _contradicts(parsed.engine, run, inputs)
    if of_another:
        parsed = None
    engine = engine or (parsed.engine if parsed else None) or (page.engine if page else None)
    fork = (parsed.fork if parsed else None) or _fork(run, engine, inputs)
    if engine and engine not in ("vllm", "sglang") and engine.startswith(("vllm", "sglang")):
        fork, engine = fork or engine, "vllm" if engine.startswith("vllm") else "sglang"
    version = (
        inputs.version or (run.version if run else None) or (recorded.version if recorded else None)
    )
    version = version or (parsed.version if parsed else None)
    printed, given = printed_arguments(run, engine, version)
    typed = dict(parsed.arguments) if parsed else {}
    arguments = {**given, **typed, **other_values(typed, given), **_rejected(run)}
    numbers = run.numbers if run else {}
    generation = _generation(run, engine, version)
    since, until = (None, None) if version else release_span(run, engine, generation)
    total = _total(run, inputs.series)
    length = numbers.get("max_model_tokens") or _integer(
        (run.config if run else {}).get("max_seq_len")
    )
    length = length or (page.max_model_len if page else None) or numbers.get("context_tokens")
    known = {**printed, **arguments, **({k: v for k, v in given.items() if run is not None})}
    known.update(_configured(run, known))
    if "batched_tokens" in numbers:
        known.setdefault("--max-num-batched-tokens", numbers["batched_tokens"])
    if "utilization_ratio" in numbers:
        known.setdefault("--gpu-memory-utilization", numbers["utilization_ratio"])
    elif page is not None and page.gpu_memory_utilization is not None:
        known.setdefault("--gpu-memory-utilization", page.gpu_memory_utilization)
    gpu_name = next((gpu.name for gpu in inputs.gpus if gpu.name), None)
    in_force = flags.in_force(
        engine,
        version,
        generation=generation,
        arguments=known,
        total_bytes=total,
        max_model_len=length,
        gpu_name=gpu_name,
    )
    in_force = {flag: value for flag, value in in_force.items() if not _is_damaged(value)}
    fixed = run.find_last("vllm.kv_fixed") if run else None
    if fixed is not None and "kv_bytes" in fixed.fields:
        in_force.setdefault("--kv-cache-memory-bytes", fixed.fields["kv_bytes"])
    measured = _measured(engine, numbers)
    for flag, value in measured.items():
        if in_force.get(flag) is None:
            in_force[flag] = value
    block = _integer(in_force.get("--block-size")) or _BLOCK
    blocks = numbers.get("override_block_count", numbers.get("block_count"))
    tokens = _kv_tokens(run, page, blocks, block, engine)
    config = run.config if run else {}
    if "dtype" in config:
        in_force["--dtype"] = config["dtype"].removeprefix("torch.")
    if config.get("device_config") == "cpu":
        in_force["--device"] = "cpu"
    kv_bytes = numbers.get("kv_bytes")
    if kv_bytes is not None and run is not None and len(run.by_rank.get("kv_bytes", {})) > 1:
        kv_bytes = min(run.by_rank["kv_bytes"].values())
    profiled = numbers.get("profiled_block_count")
    if kv_bytes and profiled and "override_block_count" in numbers:
        arguments.setdefault("--num-gpu-blocks-override", numbers["override_block_count"])
        kv_bytes = round(kv_bytes * numbers["override_block_count"] / profiled)
    if "k_bytes" in numbers and "v_bytes" in numbers:
        kv_bytes = numbers["k_bytes"] + numbers["v_bytes"]
    return EngineFacts(
        id=identity,
        engine=engine,
        fork=fork,
        version=version,
        version_since=since,
        version_until=until,
        model=(run.model if run else None)
        or (parsed.model if parsed else None)
        or _text(arguments.get("--model-path" if engine == "sglang" else "--model"))
        or (page.model_name if page else None)
        or config.get("model"),
        command=tuple(parsed.argv)
        if parsed and parsed.argv
        else (recorded.command if recorded and not of_another else None),
        arguments=arguments,
        in_force=in_force,
        env={**(dict(recorded.env) if recorded else {}), **(dict(parsed.env) if parsed else {})},
        pids=tuple(recorded.pids)
        if recorded and recorded.pids
        else tuple(sorted(run.pids))[:64]
        if run
        else (),
        gpus=tuple(recorded.gpus)
        if recorded and recorded.gpus
        else tuple(g.index for g in inputs.gpus if g.index is not None),
        phase=_phase(run, inputs, page),
        generation=generation,
        kv_tokens=tokens,
        kv_blocks=blocks,
        block_size_tokens=_integer(in_force.get("--block-size"))
        or (block if blocks is not None and engine == "vllm" else None),
        max_model_len=length,
        max_concurrency=numbers.get("concurrency_ratio"),
        total_bytes=total,
        free_at_start_bytes=numbers.get("free_bytes"),
        weights_bytes=_weights(run),
        kv_bytes=kv_bytes,
        activation_bytes=numbers.get("activation_bytes"),
        non_torch_bytes=numbers.get("non_torch_bytes"),
        graph_bytes=numbers.get("graph_bytes"),
        available_gpu_bytes=numbers.get("avail_bytes")
        if run is not None and run.find("sglang.capacity")
        else None,
        model_config=inputs.model_config,
        gpu_name=gpu_name,
        started_at=(run.began_at if run else None) or (recorded.started_at if recorded else None),
        arguments_seen=bool(parsed) or (run is not None and run.printed is not None),
        accepted=frozenset(printed),
        values_seen=frozenset(
            [*measured, *(flag for flag, value in known.items() if value is not None)]
        ),
    )


def _configured(run: Run | None, known: Mapping[str, Any]) -> dict[str, str]:
    config = run.config if run is not None else {}
    return {
        flag: config[field]
        for field, flag in _CONFIGURED.items()
        if field in config and known.get(flag) is None
    }


def _measured(engine: str | None, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that SGLang prints when its pools stand, whatever was given."""
    if engine != "sglang":
        return {}
    named = {"--max-running-requests": "running_count", "--chunked-prefill-size": "chunk_tokens"}
    return {flag: numbers[name] for flag, name in named.items() if name in numbers}


def _is_damaged(value: object) -> bool:
    """Whether it is a number that no server can have taken, such as infinity."""
    return isinstance(value, int | float) and not abs(value) < LARGEST


def _contradicts(commanded: str | None, run: Run | None, inputs: Inputs) -> bool:
    """Whether a command starts another engine than the one that names itself in the log."""
    if inputs.engine is not None or run is None or run.find(*_BANNERS) is None:
        return False
    return None not in (commanded, run.engine) and commanded != run.engine


def _command(inputs: Inputs, recorded: RecordedEngine | None) -> str | tuple[str, ...] | None:
    if inputs.command:
        return inputs.command
    return tuple(recorded.command) if recorded and recorded.command else None


def _fork(run: Run | None, engine: str | None, inputs: Inputs) -> str | None:
    texts = [gpu.name or "" for gpu in inputs.gpus]
    if run is not None:
        texts += [run.config.get("device_config", "")]
        texts += [path for failure in run.failures[:20] for path in failure.paths[:4]]
        texts += [failure.message[:80] for failure in run.failures[:20]]
    joined = " ".join(texts)
    for pattern, fork in _FORKS:
        if pattern.search(joined) and (engine or "").split("-")[0] in fork.replace(
            "sgl-", "sglang-"
        ):
            return fork
    return None


def printed_arguments(
    run: Run | None, engine: str | None, version: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server printed as its arguments: every value, and those that were given."""
    if run is None or run.printed is None or engine not in ("vllm", "sglang"):
        return {}, {}
    values = commandline.parse_namespace(run.printed, engine=engine, version=version)
    values = {
        flag: value
        for flag, value in values.items()
        if flag not in ("--model-tag", "--subparser", "--dispatch-function")
    }
    if run.find("vllm.non_default_args") is not None:
        return values, values
    told = {
        flag: value
        for flag, value in values.items()
        if _MEMORY_FLAGS.match(flag)
        and value not in (None, False, "", "auto", [], {})
        and not isinstance(value, dict)
    }
    return values, told


def _rejected(run: Run | None) -> dict[str, Any]:
    """The flag that the parser refused, with its value: then nothing else is printed."""
    failures: Iterable[Mapping[str, Any]] = ()
    if run is not None:
        failures = [e.fields for e in run.all("argparse.error")] + [
            fields for f in run.failures for p, fields in f.matches if p.id == "argparse.error"
        ]
    for fields in failures:
        flag = str(fields.get("flag") or "").split("/")[0].strip()
        value = _REJECTED.search(str(fields.get("why") or ""))
        if flag.startswith("--") and value is not None:
            return {flag: value[1].strip("'\" ")}
    return {}


def _generation(run: Run | None, engine: str | None, version: str | None) -> str | None:
    """V0 or V1: the banner's word, else what the log's own lines give away, else the release."""
    if engine != "vllm":
        return None
    if run is not None:
        if run.generation is not None:
            return run.generation
        if run.find("vllm.blocks", "vllm.preempt_v0", "vllm.weights_v0") is not None and any(
            load.swapped is not None for load in run.loads
        ):
            return "V0"
        if any(load.swapped is not None for load in run.loads):
            return "V0"
        by_code = generation_of_code(run)
        if by_code is not None:
            return by_code
    at = versions.release(version)
    if at is None:
        return None
    if at >= (0, 11, 0):
        return "V1"
    return "V0" if at < (0, 6, 4) or (at < (0, 8, 0) and run is not None) else None


def _total(run: Run | None, series: Series) -> int | None:
    """CUDA's total of a card: printed by a check or a refused allocation, else NVML's less its reserve."""
    if run is not None:
        for failure in run.failures:
            if failure.oom is not None and failure.oom.total_bytes:
                return failure.oom.total_bytes
            for _, fields in failure.matches:
                if fields.get("total_bytes"):
                    return int(fields["total_bytes"])
        if run.numbers.get("total_bytes"):
            return int(run.numbers["total_bytes"])
    totals = [g.total_bytes - (g.reserved_bytes or 0) for g in series.gpus[:64] if g.total_bytes]
    return min(totals, default=None)


def _weights(run: Run | None) -> int | None:
    if run is None:
        return None
    weights = run.numbers.get("weights_bytes")
    if (
        weights is None
        and "free_bytes" in run.numbers
        and "avail_bytes" in run.numbers
        and run.find("sglang.load_end")
    ):
        begin, end = run.find("sglang.load_begin"), run.find("sglang.load_end")
        if begin and end and "free_bytes" in begin.fields and "avail_bytes" in end.fields:
            return int(begin.fields["free_bytes"] - end.fields["avail_bytes"])
    return weights


def _kv_tokens(
    run: Run | None, page: PageInput | None, blocks: int | None, block: int, engine: str | None
) -> int | None:
    if run is not None and run.numbers.get("kv_tokens"):
        return int(run.numbers["kv_tokens"])
    if blocks is not None and engine == "vllm":
        return blocks * block
    if page is not None and page.kv_tokens:
        return max(page.kv_tokens.values())
    return None


def _phase(run: Run | None, inputs: Inputs, page: PageInput | None) -> Phase:
    if page is not None and inputs.live:
        return "serving"
    if run is None:
        return "serving" if page is not None else "unknown"
    if run.ended is not None or any(_ends(failure) for failure in run.failures):
        return "exited"
    if run.reached("ready"):
        return "serving"
    return "starting" if run.engine else "unknown"


def _ends(failure: Failure) -> bool:
    causes = {pattern.cause for pattern, _ in failure.matches}
    return bool(failure.kinds & {"oom", "check", "messenger", "failure"}) and not causes & {
        "request_too_long",
        "tokenizer_crash",
    }


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return round(value)
    if isinstance(value, str) and value.isdigit() and len(value) < 18:
        return int(value)
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
