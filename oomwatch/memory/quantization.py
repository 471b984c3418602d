"""What one weight costs under each quantization, and which modules of a checkpoint are quantized.

`read_quantization` turns a ``quantization_config`` (or a ``--quantization`` flag) into a function
from module name to `Format`. Names are compared in one spelling, without the ``model.`` and
``language_model.`` parts that checkpoints put in different orders.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from oomwatch.memory.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Storage of a quantized matrix: bits per weight, and what stands beside the weights."""

    name: str
    bits: float
    group: int = 0  # inputs that share one scale; 0: none
    scale_bytes: int = 0
    zero_bits: int = 0
    block: int = 0  # square block of one scale (fp8 block quantization)
    per_channel_bytes: int = 0
    per_input_bytes: int = 0

    def tensors(self, rows: int, columns: int) -> tuple[int, ...]:
        """Bytes of each tensor of a matrix with `rows` outputs and `columns` inputs."""
        sizes = [int(rows * columns * self.bits / 8)]
        if self.group:
            groups = -(-columns // self.group)
            sizes.append(rows * groups * self.scale_bytes)
            if self.zero_bits:
                sizes.append(rows * groups * self.zero_bits // 8)
        if self.block:
            sizes.append(-(-rows // self.block) * -(-columns // self.block) * 4)
        if self.per_channel_bytes:
            sizes.append(rows * self.per_channel_bytes)
        if self.per_input_bytes:
            sizes.append(columns * self.per_input_bytes)
        return tuple(sizes)


PLAIN: Final = Format("none", 16)
FP8_BLOCK: Final = Format("fp8 block", 8, block=128)
FP8_CHANNEL: Final = Format("fp8 channel", 8, per_channel_bytes=4)
FP8_TENSOR: Final = Format("fp8", 8)
INT8_CHANNEL: Final = Format("int8 channel", 8, per_channel_bytes=4)
MXFP4: Final = Format("mxfp4", 4, group=32, scale_bytes=1)
MXFP8: Final = Format("mxfp8", 8, group=32, scale_bytes=1)
NVFP4: Final = Format("nvfp4", 4, group=16, scale_bytes=1)
NF4: Final = Format("nf4", 4, group=64, scale_bytes=1)  # scales are quantized too


def int_group(bits: int, group: int, *, zeros: bool, ordered: bool = False) -> Format:
    """GPTQ, AWQ and their kin: packed integers, 16-bit scales, packed zero points.

    `ordered` is GPTQ's activation order: two 32-bit index tables over the inputs.
    """
    size = max(0, group)
    return Format(
        f"int{bits} g{group}",
        bits,
        group=size,
        scale_bytes=2 if size else 0,
        zero_bits=bits if zeros and size else 0,
        per_channel_bytes=0 if size else 2,
        per_input_bytes=8 if ordered else 0,
    )


Chooser = Callable[[str], Format]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint: its method, and the format of each module by name."""

    method: str
    of: Chooser
    kv_cache_dtype: str | None = None
    """What ``--kv-cache-dtype auto`` means for this checkpoint, where it says so."""
    known: bool = True


def canonical(name: str) -> str:
    """One spelling of a module name: no leading ``model.``, ``language_model.`` parts."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("model", "language_model", "text_model"):
        parts.pop(0)
    return ".".join(parts)


class _Names:
    """Names, prefixes, globs and ``re:`` expressions, as exclusion lists mix them."""

    def __init__(self, patterns: object) -> None:
        self.exact: set[str] = set()
        expressions: list[str] = []
        for item in patterns if isinstance(patterns, list | tuple | Mapping) else ():
            text = str(item)
            if text.startswith("re:"):
                expressions.append(text[3:])
            elif any(c in text for c in "*?["):
                expressions.append(fnmatch.translate(canonical(text)))
            else:
                self.exact.add(canonical(text))
        self._expressions = [_compiled(x) for x in expressions]

    def __contains__(self, name: str) -> bool:
        short = canonical(name)
        parts = short.split(".")
        if any(".".join(parts[:end]) in self.exact for end in range(1, len(parts) + 1)):
            return True
        return any(x.match(short) or x.match("model." + short) for x in self._expressions)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error:
        return re.compile(re.escape(expression))


def _whole(value: object, otherwise: int) -> int:
    """A positive whole number below a thousand, else `otherwise`."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1024:
        return value
    return otherwise


def _inside(name: str) -> bool:
    """Whether a module is a linear layer of a decoder block (heads and embeddings are not)."""
    return name.startswith("layers.") or ".layers." in name


def plain() -> Quantization:
    """A 16-bit checkpoint."""
    return Quantization("none", lambda _name: PLAIN)


@functools.lru_cache(maxsize=16)
def quantization_of(model: ModelConfig, flag: str | None = None) -> Quantization:
    """`read_quantization` of a model, read once."""
    return read_quantization(model.quantization, flag)


def read_quantization(config: Mapping[str, Any] | None, flag: str | None = None) -> Quantization:
    """The quantization that a checkpoint and a ``--quantization`` flag give together.

    A flag on a checkpoint that is quantized already only names its kernel; on a 16-bit checkpoint
    it quantizes while loading (fp8 and bitsandbytes).
    """
    if not config:
        return _by_flag(flag)
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    readers: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Quantization]], ...] = (
        (("fp8", "fbgemm_fp8"), _fp8),
        (("compressed-tensors", "compressed_tensors"), _compressed_tensors),
        (("modelopt", "modelopt_fp4", "nvfp4", "modelopt_mixed"), _modelopt),
        (("mxfp4", "gpt_oss_mxfp4"), _mxfp4),
        (("awq", "gptq", "awq_marlin", "gptq_marlin"), _integer),
        (("auto-round", "auto_round", "intel/auto-round"), _auto_round),
        (("bitsandbytes",), _bitsandbytes),
    )
    for names, reader in readers:
        if method in names:
            return reader(config)
    bits = _whole(config.get("bits") or config.get("w_bit"), 16)
    guess = int_group(bits, 128, zeros=True) if bits < 16 else FP8_TENSOR
    return Quantization(
        method or "unnamed", lambda n: guess if _inside(canonical(n)) else PLAIN, known=False
    )


def _by_flag(flag: str | None) -> Quantization:
    if flag in ("fp8", "ptpc_fp8", "fp8_per_tensor"):
        return Quantization("fp8", lambda n: FP8_TENSOR if _inside(canonical(n)) else PLAIN)
    if flag == "fp8_per_block":
        return Quantization("fp8", lambda n: FP8_BLOCK if _inside(canonical(n)) else PLAIN)
    if flag == "bitsandbytes":
        return Quantization("bitsandbytes", lambda n: NF4 if _inside(canonical(n)) else PLAIN)
    if flag in (None, "", "none", "auto"):
        return plain()
    return dataclasses.replace(plain(), method=str(flag), known=False)


def _excluding(method: str, fmt: Format, excluded: _Names, **more: Any) -> Quantization:
    """One format for every linear layer of the decoder that is not excluded."""

    def choose(name: str) -> Format:
        return fmt if _inside(canonical(name)) and name not in excluded else PLAIN

    return Quantization(method, choose, **more)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    block = config.get("weight_block_size")
    fmt = FP8_BLOCK if block else FP8_TENSOR
    if config.get("quant_method") == "fbgemm_fp8":
        fmt = FP8_CHANNEL
    excluded = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return _excluding("fp8", fmt, _Names(excluded))


def _weights_format(group: Mapping[str, Any]) -> Format | None:
    """The storage of one ``config_groups`` entry, or None where it cannot be told."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return None
    bits, kind = weights.get("num_bits"), str(weights.get("type") or "int")
    strategy, size = str(weights.get("strategy") or ""), weights.get("group_size")
    if kind == "float" and bits == 4:
        return MXFP4 if size == 32 else NVFP4
    if kind == "float" and bits == 8:
        if strategy == "block":
            return FP8_BLOCK
        if size == 32:
            return MXFP8
        return FP8_CHANNEL if strategy == "channel" else FP8_TENSOR
    if kind == "int" and bits == 8 and not size:
        return INT8_CHANNEL
    if kind == "int" and _whole(bits, 0):
        return int_group(_whole(bits, 4), _whole(size, 0), zeros=not weights.get("symmetric", True))
    return None


def _groups(config: Mapping[str, Any]) -> list[tuple[_Names | None, Format]]:
    """(targets or None for every linear layer, format) of each config group."""
    found: list[tuple[_Names | None, Format]] = []
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        fmt = _weights_format(group) if isinstance(group, Mapping) else None
        if fmt is None:
            continue
        targets = group.get("targets")
        listed = isinstance(targets, list) and "Linear" not in targets
        found.append((_Names(targets) if listed else None, fmt))
    return found


def _choose(groups: list[tuple[_Names | None, Format]], excluded: _Names) -> Chooser:
    def choose(name: str) -> Format:
        if name in excluded:
            return PLAIN
        for targets, fmt in groups:
            if (targets is None and _inside(canonical(name))) or (
                targets is not None and name in targets
            ):
                return fmt
        return PLAIN

    return choose


def _kv_scheme(config: Mapping[str, Any]) -> str | None:
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        eight = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        return "fp8_e4m3" if eight and not scheme.get("dynamic") else None
    return "fp8_e4m3" if str(scheme or "").lower() == "fp8" else None


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups, excluded = _groups(config), _Names(config.get("ignore") or ())
    return Quantization(
        "compressed-tensors",
        _choose(groups, excluded),
        kv_cache_dtype=_kv_scheme(config),
        known=bool(groups),
    )


_MODELOPT: Final = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "FP8": FP8_TENSOR,
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "MXFP8": MXFP8,
    "MXFP4": MXFP4,
}


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    inner = config.get("quantization")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    excluded = _Names(config.get("ignore") or config.get("exclude_modules") or ())
    algorithm = str(config.get("quant_algo") or "").upper()
    layers = config.get("quantized_layers")
    if isinstance(layers, Mapping) and layers:
        by_format: dict[Format, list[str]] = {}
        for name, value in layers.items():
            entry = value.get("quant_algo") if isinstance(value, Mapping) else value
            by_format.setdefault(_MODELOPT.get(str(entry).upper(), FP8_TENSOR), []).append(name)
        groups: list[tuple[_Names | None, Format]] = [
            (_Names(names), fmt) for fmt, names in by_format.items()
        ]
    elif algorithm in _MODELOPT:
        groups = [(None, _MODELOPT[algorithm])]
    else:
        groups = _groups(config)
    return Quantization(
        f"modelopt {algorithm.lower()}".strip(),
        _choose(groups, excluded),
        kv_cache_dtype=_kv_scheme(config),
        known=bool(groups),
    )


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    excluded = _Names(config.get("modules_to_not_convert") or ())

    def choose(name: str) -> Format:
        return MXFP4 if name.endswith("experts") and name not in excluded else PLAIN

    return Quantization("mxfp4", choose)


def _integer(config: Mapping[str, Any]) -> Quantization:
    bits = _whole(config.get("bits") or config.get("w_bit"), 4)
    size = config.get("group_size") or config.get("q_group_size")
    group = -1 if size == -1 else _whole(size, 128)
    method = str(config.get("quant_method"))
    # GPTQ loads its zero points even where they are all the same.
    zeros = bool(config.get("zero_point", True))
    ordered = bool(config.get("desc_act")) and method.startswith("gptq")
    excluded = _Names(config.get("modules_to_not_convert") or ())
    return _excluding(method, int_group(bits, group, zeros=zeros, ordered=ordered), excluded)


def _auto_round(config: Mapping[str, Any]) -> Quantization:
    group = _whole(config.get("group_size"), 128)
    extra = config.get("extra_config")
    zeros = not config.get("sym", True)
    special = {
        canonical(name): entry["bits"]
        for name, entry in (extra.items() if isinstance(extra, Mapping) else ())
        if isinstance(entry, Mapping) and _whole(entry.get("bits"), 0)
    }
    default = _whole(config.get("bits"), 4)

    def choose(name: str) -> Format:
        short = canonical(name)
        if not _inside(short):
            return PLAIN
        bits = special.get(short, default)
        return PLAIN if bits >= 16 else int_group(bits, group, zeros=zeros)

    return Quantization("auto-round", choose)


def _bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    four = config.get("load_in_4bit") or config.get("_load_in_4bit")
    excluded = _Names(config.get("llm_int8_skip_modules") or ())
    return _excluding("bitsandbytes", NF4 if four else INT8_CHANNEL, excluded)
