"""Where a model's configuration comes from: a file, a folder, the local cache, a table, the hub.

Nothing is fetched unless `hub` is asked for. `Found` says which source answered, because a plan
from a table is worth less than one from the files that will be loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomwatch.errors import SourceUnavailable, UsageError
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.model_config import ModelConfig

_MAX_JSON_BYTES: Final = 64 << 20
_MAX_HEADER_BYTES: Final = 128 << 20
_SUFFIX: Final = re.compile(
    r"[-_.](?:instruct|chat|it|hf|base|pt|thinking|bf16|2507|0528|2506|2407|2501|\d+e)(?=$|[-_.])"
)
_QUANTIZED: Final = (
    (
        re.compile(r"[-_](?:fp8(?:[-_]dynamic)?)$"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    (
        re.compile(r"[-_]awq(?:[-_](?:int4|4bit))?$"),
        {"quant_method": "awq", "bits": 4, "group_size": 128},
    ),
    (
        re.compile(r"[-_]gptq(?:[-_](?:int4|4bit))?$"),
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ),
    (re.compile(r"[-_]gptq[-_]int8$"), {"quant_method": "gptq", "bits": 8, "group_size": 128}),
)
_DTYPE_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}  # fmt: skip - one line per width reads worse


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A model, where it was found, and the bytes of its weight files where they are there."""

    model: ModelConfig
    where: str
    note: str | None = None
    checkpoint_bytes: int | None = None


def load_model(path: str | None, name: str | None, *, hub: bool = False) -> Found:
    """The model at `path` (file or folder), else by `name` from folder, cache, table or hub.

    Raises UsageError when nothing is found or the file is no model configuration, and
    SourceUnavailable when the hub cannot be reached.
    """
    if path is not None:
        return _from_path(Path(path).expanduser())
    if not name:
        raise UsageError("no model: name it in the server command, or give --model-config PATH")
    here = Path(name).expanduser()
    if os.access(here, os.F_OK) and (here.is_dir() or here.suffix == ".json"):
        return _from_path(here)
    cached = _in_cache(name)
    if cached is not None:
        return _from_path(cached)
    if hub:
        return Found(parse_config(_download(name)), f"hub: {name}")
    known = _in_table(name)
    if known is not None:
        raw, note = known
        return Found(parse_config(raw), "built-in table", note)
    near = _nearest(name)
    raise UsageError(
        f"the sizes of {name} are not here; give --model-config config.json, or --hub to fetch it"
        + (f"; the nearest known is {near}" if near else "")
        + " (all names: plan --list-models)"
    )


def known_names() -> list[str]:
    """The models of the built-in table, by the names that find them."""
    from oomwatch.memory.data.models import ALIASES, MODELS  # noqa: PLC0415 - large, rarely needed

    return sorted({*MODELS, *ALIASES})


def _nearest(name: str) -> str | None:
    """The known name that begins this one, such as that of its shorter context, or is spelt so."""
    plain = name.rsplit("/", 1)[-1].lower()[:100]
    names = known_names()
    begun = [each for each in names if re.match(re.escape(each) + r"(?![a-z0-9.])", plain)]
    return max(begun, key=len, default=None) or next(
        iter(difflib.get_close_matches(plain, names, 1, 0.75)), None
    )


def _from_path(path: Path) -> Found:
    file = config_file(path)
    raw = dict(read_config(file))
    extra = file.parent / "hf_quant_config.json"
    if "quantization_config" not in raw and extra.is_file():
        raw["quantization_config"] = {"quant_method": "modelopt", **read_config(extra)}
    model = parse_config(raw)
    return Found(model, str(file), None, checkpoint_bytes(file.parent, len(model.layers)))


def config_file(path: Path) -> Path:
    """The configuration at `path`, a file or a model's folder. Raises UsageError if it has none."""
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or 'cannot be read'}") from error
    if not is_folder:
        return path
    file = next((path / n for n in ("config.json", "params.json") if (path / n).is_file()), None)
    if file is None:
        raise UsageError(f"{path} has no config.json")
    return file


def read_config(file: Path) -> Mapping[str, Any]:
    """The JSON object of a file. Raises UsageError when it cannot be read or is none."""
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is not a regular file")
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise UsageError(f"{file} is too large for a model configuration")
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or 'cannot be read'}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{file} is not a model configuration")
    return loaded


def _in_cache(name: str) -> Path | None:
    """The snapshot folder of `name` in the Hugging Face cache of this user."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    root = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")
    folder = root / f"models--{name.replace('/', '--')}"
    try:
        ref = folder / "refs" / "main"
        names = [ref.read_text(encoding="utf-8").strip()] if ref.is_file() else []
        snapshots = folder / "snapshots"
        if snapshots.is_dir():
            names += sorted(x.name for x in snapshots.iterdir())
        for each in names:
            if (snapshots / each / "config.json").is_file():
                return snapshots / each
    except (OSError, ValueError):
        return None
    return None


def _in_table(name: str) -> tuple[Mapping[str, Any], str] | None:
    from oomwatch.memory.data.models import ALIASES, MODELS  # noqa: PLC0415 - large, rarely needed

    plain = name.rsplit("/", 1)[-1].lower()
    quant: Mapping[str, Any] | None = None
    for pattern, config in _QUANTIZED:
        if pattern.search(plain):
            plain, quant = pattern.sub("", plain), config
            break
    key = plain
    while key not in MODELS and key not in ALIASES:
        shorter = _SUFFIX.sub("", key, count=1)
        if shorter == key:
            return None
        key = shorter
    raw = dict(MODELS[ALIASES.get(key, key)])
    note = f"sizes of {ALIASES.get(key, key)} from the built-in table"
    if quant is not None:
        raw["quantization_config"] = quant
        note += f"; {quant['quant_method']} quantization taken from the name"
    return raw, note


def checkpoint_bytes(folder: Path, layers: int) -> int | None:
    """Bytes of all tensors in the folder's safetensors files, without multi-token prediction.

    None without such files, or when a header cannot be read. Only headers are read.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
        return sum(_tensors_bytes(file, layers) for file in files) if files else None
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _tensors_bytes(file: Path, layers: int) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file} has no safetensors header")
        header = json.loads(stream.read(length))
    total = 0
    for name, entry in header.items():
        if name == "__metadata__" or _is_draft(name, layers):
            continue
        elements = 1
        for size in entry["shape"]:
            elements *= int(size)
        total += elements * _DTYPE_BYTES.get(entry["dtype"], 1)
    return total


def _is_draft(name: str, layers: int) -> bool:
    """Tensors of multi-token prediction: `mtp.…`, or a layer beyond the model's last."""
    if name.startswith("mtp.") or ".mtp." in name:
        return True
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return match is not None and "vision" not in name and int(match[1]) >= layers


def _download(name: str) -> Mapping[str, Any]:
    """The config.json of a repository on the hub, with the user's own token."""
    import requests  # noqa: PLC0415 - only with --hub

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(f"{name} is not a repository name (owner/model)")
    base = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        raise SourceUnavailable("HF_HUB_OFFLINE is set: --hub cannot fetch anything")
    token = os.environ.get("HF_TOKEN") or _saved_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = requests.get(
            f"{base}/{name}/resolve/main/config.json", headers=headers, timeout=15
        )
    except requests.RequestException as error:
        raise SourceUnavailable(
            f"the hub at {base} cannot be reached; give --model-config"
        ) from error
    if answer.status_code in (401, 403):
        raise SourceUnavailable(f"{name} is gated: set HF_TOKEN to a token that may read it")
    if answer.status_code != 200:
        raise SourceUnavailable(f"the hub has no config.json for {name} ({answer.status_code})")
    try:
        loaded = answer.json()
    except ValueError as error:
        raise SourceUnavailable(f"the hub's config.json of {name} is not JSON") from error
    if not isinstance(loaded, dict):
        raise SourceUnavailable(f"the hub's config.json of {name} is not a configuration")
    return loaded


def _saved_token() -> str | None:
    home = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    try:
        return Path(home, "token").read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None
