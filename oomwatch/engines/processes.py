"""Processes of LLM servers and of others that hold GPU memory, by name and command line.

Titles as the engines set them (vLLM 0.10 on, SGLang 0.4 on); the kernel cuts the name of a process
to 15 characters, so a name alone may end early: ``VLLM::EngineCor``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final, Literal

from oomwatch.engines.launchers import Launch, find_launch

Role = Literal["server", "api", "engine", "worker", "helper", "script"]
HolderKind = Literal["engine", "desktop", "browser", "notebook", "training", "monitoring", "mps"]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTitle:
    """What a title says. `rank` is as in logs: ``TP0``, ``DP1_PP0_TP3``; None for a single one."""

    engine: str
    role: Role
    rank: str | None = None


_TITLES: Final[tuple[tuple[re.Pattern[str], str, Role], ...]] = (
    (re.compile(r"VLLM::EngineCor(?:e|$)(?P<rank>\w*)"), "vllm", "engine"),
    (re.compile(r"VLLM::Worker(?P<rank>\w*)"), "vllm", "worker"),
    (re.compile(r"VLLM::APIServer"), "vllm", "api"),
    (re.compile(r"VLLM::"), "vllm", "helper"),
    (re.compile(r"sglang::schedul(?:er|$)(?P<rank>\w*)"), "sglang", "worker"),
    (re.compile(r"sglang::(?:http_server|tokenizer)"), "sglang", "api"),
    (re.compile(r"sglang::"), "sglang", "helper"),
)
_TITLED: Final = ("VLLM::", "sglang::", "ray::")
_RANK: Final = re.compile(r"(?:PP|TP|DP|EP|CP|PCP|DCP)\d+")
_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*t?")
# Options of the interpreter that take a value in the next word.
_PYTHON_VALUES: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_LONGEST_LAUNCH: Final = 4  # words: -m lmdeploy serve api_server
# A part of each name by which `find_launch` knows a server: most processes have none of them.
_SERVER_NAME: Final = re.compile(r"vllm|VLLM|sgl|llama|lmdeploy|text-generation")

_RAY_WORKER: Final = re.compile(r"ray::(?:RayWorker|EngineCore|WorkerWrapper)")

_HOLDERS: Final[tuple[tuple[re.Pattern[str], HolderKind], ...]] = (
    (re.compile(r"nvidia-cuda-mps-(?:server|control)?"), "mps"),
    (
        re.compile(
            r"(?:Xorg|X|Xwayland|gnome-shell|gnome-.*|mutter.*|kwin_(?:x11|wayland)|plasmashell"
            r"|ksmserver|cinnamon|xfwm4|sway|Hyprland|weston|compiz|gdm.*|sddm.*|lightdm|picom"
            r"|xdg-desktop-por.*|Xvfb|nautilus|cosmic-.*|labwc|wayfire|marco|budgie-wm)"
        ),
        "desktop",
    ),
    (
        re.compile(
            r"(?:chrome|chromium.*|google-chrome.*|firefox.*|brave.*|msedge.*|opera|vivaldi.*"
            r"|Isolated Web Co|Web Content|GPU Process|WebKit.*|electron|slack|discord|Discord"
            r"|code|code-insiders|teams.*|zoom|spotify|steam.*|obs|cef_.*)"
        ),
        "browser",
    ),
    (
        re.compile(
            r"(?:nv-hostengine|dcgm.*|nvidia-smi|nvtop|nvitop|gpustat|nvidia-persiste.*"
            r"|nsys.*|ncu|gpu-feature-.*|all-smi)"
        ),
        "monitoring",
    ),
    (
        re.compile(
            r"(?:VLLM::.*|sglang::.*|vllm|sglang|text-generation.*|lmdeploy|llama-server|llama-cli"
            r"|ollama.*|tritonserver|trtllm-.*|text-embeddings-.*|koboldcpp|localai|tabbyapi"
            r"|mistralrs-server|aphrodite|xinference.*|infinity_emb)"
        ),
        "engine",
    ),
)
# Told by the command line of an interpreter, whose own name says nothing.
_HOLDER_COMMANDS: Final[tuple[tuple[re.Pattern[str], HolderKind], ...]] = (
    (re.compile(r"\bipykernel(?:_launcher)?\b|\bjupyter|\bcolab_kernel|\bmarimo\b"), "notebook"),
    (
        re.compile(
            r"\bvllm\b|\bsglang\b|\blmdeploy\b|\btext_generation_server\b|\btensorrt_llm\b"
            r"|\bllama_cpp\b|\bray::RayWorker"
        ),
        "engine",
    ),
    (
        re.compile(
            r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\bdeepspeed\b|\baccelerate\b"
            r"|\bfinetun|\bfine_tun|\btrain\w*\.py\b|\bsft\b|\bverl\b|\bopenrlhf\b"
        ),
        "training",
    ),
    (re.compile(r"--type=(?:gpu-process|renderer)\b"), "browser"),
)


def read_title(name: str | None, cmdline: Sequence[str] | None) -> EngineTitle | None:
    """The engine part that a process names itself, from its command line or its name."""
    for text in (cmdline[0] if cmdline else None, name):
        if not text or not text.startswith(_TITLED):
            continue
        if _RAY_WORKER.match(text):
            return EngineTitle("vllm", "worker")
        for pattern, engine, role in _TITLES:
            if match := pattern.match(text):
                ranks = _RANK.findall(match.groupdict().get("rank") or "")
                return EngineTitle(engine, role, "_".join(ranks) or None)
    return None


def is_ray_worker(name: str | None, cmdline: Sequence[str] | None) -> bool:
    """Whether Ray started it: then its parent is Ray's, not the server."""
    return any(text and _RAY_WORKER.match(text) for text in (*(cmdline or ())[:1], name))


def read_launch(cmdline: Sequence[str] | None) -> Launch | None:
    """The server that a process itself runs.

    Unlike in a line that a person typed, a wrapper (``sudo``, ``timeout``, a shell, ``docker``)
    does not count: the server is its child. Neither do words that only look like a launch.
    """
    words = _without_interpreter(list(cmdline or ()))[:_LONGEST_LAUNCH]
    if not _SERVER_NAME.search(" ".join(words)):
        return None
    for length in range(1, len(words) + 1):
        launch = find_launch(words[:length])
        if launch is not None:
            in_container = launch.environment is not None
            starts_here = words[0] == "-m" or find_launch(words[1:length]) is None
            return launch if starts_here and not in_container else None
    return None


def holder_kind(name: str | None, cmdline: Sequence[str] | None = None) -> HolderKind | None:
    """What sort of program holds GPU memory; None for one that is not known by name."""
    program = (cmdline[0] if cmdline else "").rsplit("/", 1)[-1]
    for text in (program, name or ""):
        for pattern, kind in _HOLDERS:
            if text and pattern.fullmatch(text):
                return kind
    line = " ".join(cmdline or ())[:4096]
    for pattern, kind in _HOLDER_COMMANDS:
        if pattern.search(line):
            return kind
    return None


def _without_interpreter(words: list[str]) -> list[str]:
    """The words from the script, or from ``-m``, on."""
    if not words or not _PYTHON.fullmatch(words[0].rsplit("/", 1)[-1]):
        return words
    place = 1
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "-m":
            break
        if words[place] == "-c":
            return []
        place += 2 if words[place] in _PYTHON_VALUES else 1
    return words[place:]
