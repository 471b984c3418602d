"""Where a server's own arguments begin in a longer command line, and which engine it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_CONTAINER_TOOLS: Final = frozenset({"docker", "podman", "nerdctl"})

# Programs by the last part of their path, with the words that must follow.
_PROGRAMS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vllm": ("vllm", ("serve",)),
    "sglang": ("sglang", ("serve",)),
    "text-generation-launcher": ("tgi", ()),
    "text-generation-server": ("tgi", ("serve",)),
    "lmdeploy": ("lmdeploy", ("serve", "api_server")),
    "llama-server": ("llama.cpp", ()),
    "ollama": ("ollama", ("serve",)),
}
# Modules after ``-m``, with the words that must follow.
_MODULES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vllm.entrypoints.openai.api_server": ("vllm", ()),
    "vllm.entrypoints.api_server": ("vllm", ()),
    "vllm.entrypoints.cli.main": ("vllm", ("serve",)),
    "vllm": ("vllm", ("serve",)),
    "sglang.launch_server": ("sglang", ()),
    "sglang": ("sglang", ("serve",)),
    "sglang_server": ("sglang", ()),
    "sgl_jax.launch_server": ("sglang", ()),
    "lmdeploy": ("lmdeploy", ("serve", "api_server")),
    "llama_cpp.server": ("llama.cpp", ()),
}
_SCRIPTS: Final = (
    (re.compile(r"vllm/.*api_server\.py$"), "vllm"),
    (re.compile(r"sgl[^/]*/(?:.*/)?launch_server\.py$"), "sglang"),
)
# Container images whose entry point is the server: the engine by a part of the image's name.
_IMAGES: Final = (
    ("text-generation-inference", "tgi"),
    ("llama.cpp", "llama.cpp"),
    ("llama-cpp", "llama.cpp"),
    ("lmdeploy", "lmdeploy"),
    ("sglang", "sglang"),
    ("vllm", "vllm"),
)
_FORKS: Final = ("vllm-ascend", "vllm-omni", "vllm-gaudi", "vllm-neuron", "vllm-metal")
# Process titles that engines give their children; the flags are on the parent.
_TITLES: Final = (("VLLM::", "vllm"), ("sglang::", "sglang"))

_CONTAINER_SWITCHES: Final = frozenset(
    {"--rm", "--detach", "--interactive", "--tty", "--privileged", "--init", "--read-only"}
    | {"--publish-all", "--quiet", "--no-healthcheck", "--oom-kill-disable", "--replace", "--rmi"}
)
_CONTAINER_SHORT_SWITCHES: Final = frozenset("ditqP")
_CONTAINER_NAMES: Final = {"-e": "--env", "-m": "--memory", "-v": "--volume", "-p": "--publish"}


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """What starts the server: `words[arguments:]` are its own arguments.

    `environment` is where a container tool takes further ``-e NAME=VALUE``; None without one.
    """

    engine: str
    arguments: int
    begin: int = 0
    fork: str | None = None
    version: str | None = None
    environment: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    container: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module: str | None = None


def assignment(word: str) -> tuple[str, str] | None:
    """``NAME=value`` as a pair, or None for any other word."""
    match = _ASSIGNMENT.fullmatch(word)
    return (match.group(1), match.group(2)) if match else None


def shell_script(words: Sequence[str]) -> str | None:
    """The script of ``bash -c SCRIPT`` (also inside ``docker run image bash -c SCRIPT``), or None."""
    for index, word in enumerate(words[:-2]):
        if _base(word) in _SHELLS:
            for place in range(index + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[place]):
                    return words[place + 1]
                if not words[place].startswith("-"):
                    break
    return None


def find_launch(words: Sequence[str]) -> Launch | None:
    """The server that a command line starts, or None when it starts none that is known."""
    return _container_run(words) or _direct(words)


def _direct(words: Sequence[str]) -> Launch | None:
    """A server started without a container tool in front."""
    for index in range(len(words)):
        found = _starts_at(words, index)
        if found is not None:
            engine, arguments, module = found
            env = dict(pair for word in words[:index] if (pair := assignment(word)))
            return Launch(
                engine,
                arguments,
                begin=_first_word(words, index),
                fork="sgl-jax" if module and module.startswith("sgl_jax") else None,
                env=env,
                module=module,
            )
    return None


def _starts_at(words: Sequence[str], index: int) -> tuple[str, int, str | None] | None:
    word = words[index]
    if word == "-m" and index + 1 < len(words) and words[index + 1] in _MODULES:
        engine, follow = _MODULES[words[index + 1]]
        after = index + 2
        if tuple(words[after : after + len(follow)]) == follow:
            return engine, after + len(follow), words[index + 1]
    base = _base(word)
    if base in _PROGRAMS:
        engine, follow = _PROGRAMS[base]
        if tuple(words[index + 1 : index + 1 + len(follow)]) == follow:
            return engine, index + 1 + len(follow), None
    for pattern, engine in _SCRIPTS:
        if len(word) < 4096 and pattern.search(word):
            return engine, index + 1, None
    if index == 0:
        for title, engine in _TITLES:
            if word.startswith(title):
                return engine, len(words), None
    return None


def _container_run(words: Sequence[str]) -> Launch | None:
    """``docker run OPTIONS IMAGE ARGUMENTS``, also with podman or nerdctl, sudo or env before it."""
    at = next((i for i, word in enumerate(words) if _base(word) in _CONTAINER_TOOLS), None)
    run = (
        next((i for i in range(at + 1, len(words)) if words[i] == "run"), None)
        if at is not None
        else None
    )
    if run is None:
        return None
    env: dict[str, str] = {}
    options: dict[str, str] = {}
    place = run + 1
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].partition("=")
        place += 1
        short = re.fullmatch(r"-([A-Za-z])(.*)", name, re.DOTALL)
        if short and set(name[1:]) <= _CONTAINER_SHORT_SWITCHES:
            continue
        if short and short.group(2):  # -eNAME=VALUE, -p8000:8000
            name, value, equals = f"-{short.group(1)}", short.group(2) + equals + value, "="
        if name in _CONTAINER_SWITCHES:
            continue
        if not equals and place < len(words):
            value = words[place]
            place += 1
        name = _CONTAINER_NAMES.get(name, name)
        pair = assignment(value) if name == "--env" else None
        if pair:
            env[pair[0]] = pair[1]
        elif name != "--env":
            options[name] = value
    if place >= len(words):
        return None
    image = words[place]
    inside = place + 1
    server = _direct(words[inside:])
    if server is None and "--entrypoint" in options:
        moved = _direct([options["--entrypoint"], *words[inside:]])
        server = dataclasses.replace(moved, arguments=moved.arguments - 1) if moved else None
    engine = (
        server.engine if server else next((e for part, e in _IMAGES if part in image.lower()), None)
    )
    if engine is None:
        return None
    tag = re.search(r":v?(\d+\.\d+[\w.]*)", image)
    return Launch(
        engine,
        inside + (server.arguments if server else 0),
        begin=0,
        fork=next(
            (fork for fork in _FORKS if fork in image.lower()), server.fork if server else None
        ),
        version=tag.group(1) if tag else None,
        environment=place,
        env={**env, **(server.env if server else {})},
        container=options,
        module=server.module if server else None,
    )


def _first_word(words: Sequence[str], launcher: int) -> int:
    """Where the command proper begins: after leading assignments, so that they can be rewritten."""
    begin = 0
    if words[0] == "env":
        begin = 1
    while begin < launcher and assignment(words[begin]):
        begin += 1
    return 0 if words[0] == "env" and begin == 1 else begin


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]
