"""Command lines of LLM servers, read as the engine's own argument parser reads them.

Aliases, ``--flag=value``, underscores for dashes, ``--no-…``, unique prefixes, dotted JSON keys
(``--compilation-config.cudagraph_mode NONE``), configuration files, environment assignments,
``python -m …``, ``bash -c …`` and ``docker run … image arguments``. Nothing raises on any text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oomwatch.engines import launchers, namespaces, options, shell

Value = str | bool | list[str]
"""What a flag holds: its text, True for a switch, False for its ``--no-`` form, or several texts."""

_MAX_WORDS: Final = 20_000
_MAX_CONFIG_BYTES: Final = 1 << 20
_NUMBER: Final = re.compile(r"-(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_LEVEL: Final = re.compile(r"-O(\d)")
_TRUTH: Final = frozenset({"true", "false", "1", "0", "yes", "no"})
_MODEL_FLAGS: Final = ("--model", "--model-path", "--model-id", "--hf-repo")


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """One option as it stands in the command: `argv[begin:end]`; `key` is what follows a dot."""

    flag: str
    typed: str
    value: Value
    begin: int
    end: int
    key: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server's command line. `arguments` go by canonical long flag; the last one typed counts.

    `argv` are the words as split (of the inner script for ``bash -c``); `problems` say what the
    engine would refuse or what could not be read. `version` is told by a container image's tag.
    """

    engine: str | None = None
    fork: str | None = None
    model: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    argv: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    problems: tuple[str, ...] = ()
    version: str | None = None
    container: Mapping[str, str] = dataclasses.field(default_factory=dict)
    launch: launchers.Launch | None = None


def parse_command(
    command: str | Sequence[str],
    *,
    engine: str = "auto",
    version: str | None = None,
    env: Mapping[str, str] | None = None,
    read_files: bool = False,
) -> ServerCommand:
    """The server in a command line or an argument vector.

    With `engine` other than ``auto`` a line without a known program is taken as that engine's bare
    arguments. `env` is the process environment; assignments in the line override it. Files named
    by ``--config`` are opened only with `read_files`.
    """
    problems: list[str] = []
    words, exported = _words(command, problems)
    launch = launchers.find_launch(words) if words else None
    name = launch.engine if launch else None if engine == "auto" else engine
    if engine not in ("auto", name):
        problems.append(f"the command starts {name}, not {engine}")
    version = version or (launch.version if launch else None)
    begin = launch.arguments if launch else 0
    known_env = {**(env or {}), **exported, **(launch.env if launch else {})}
    if name is None:
        return ServerCommand(argv=tuple(words), env=known_env, problems=tuple(problems))
    if launch is not None and launch.module == "sglang_server":
        problems.append("there is no module sglang_server; the server is sglang.launch_server")
    given, free = _read_options(name, version, words, begin, problems)
    arguments = _collect(given)
    if read_files and isinstance(arguments.get("--config"), str):
        arguments = {**_config_file(name, version, arguments["--config"], problems), **arguments}
    model = next(
        (str(arguments[f]) for f in _MODEL_FLAGS if isinstance(arguments.get(f), str)), None
    )
    if free and name in ("vllm", "lmdeploy"):  # `vllm serve MODEL`: the positional form wins
        model = free[0]
    return ServerCommand(
        engine=name,
        fork="vllm-omni" if "--omni" in arguments else launch.fork if launch else None,
        model=model,
        arguments=arguments,
        env=known_env,
        argv=tuple(words),
        given=given,
        problems=tuple(problems),
        version=version,
        container=launch.container if launch else {},
        launch=launch,
    )


def parse_namespace(
    text: str, *, engine: str = "vllm", version: str | None = None
) -> dict[str, Any]:
    """``Namespace(…)``, ``non-default args: {…}``, ``ServerArgs(…)`` as flag -> Python value.

    Names become canonical long flags; None (not given) is left out. Values that are no literals
    stay as the text they were printed as.
    """
    found: dict[str, Any] = {}
    for key, value in namespaces.parse_repr(text).items():
        name = "--" + key.lstrip("-").replace("_", "-")
        if value is not None:
            found[options.find_option(engine, version, name).flag] = value
    return found


def rebuild(
    command: ServerCommand | str | Sequence[str],
    set: Mapping[str, Any],  # noqa: A002 - named as the field of a remedy
    unset: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """`rebuilt_words`, quoted for a POSIX shell."""
    return shell.quote(rebuilt_words(command, set, unset, env))


def rebuilt_words(
    command: ServerCommand | str | Sequence[str],
    set: Mapping[str, Any],  # noqa: A002 - named as the field of a remedy
    unset: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """The whole command with flags replaced, removed and added.

    A flag that is already there is replaced where it stands, whatever spelling it has there;
    variables go before the command, or into ``docker run -e``.
    """
    known = command if isinstance(command, ServerCommand) else parse_command(command)
    engine = known.engine or "vllm"
    wanted = {options.find_option(engine, known.version, _name(f)).flag: f for f in set}
    gone = {options.find_option(engine, known.version, _name(f)).flag for f in unset}
    at: dict[int, list[str]] = {}
    dropped = bytearray(len(known.argv))
    placed: list[str] = []
    for each in known.given:
        if each.flag not in wanted and each.flag not in gone:
            continue
        dropped[each.begin : each.end] = b"\1" * (each.end - each.begin)
        if each.flag in wanted and each.flag not in placed:
            placed.append(each.flag)
            at[each.begin] = _as_words(wanted[each.flag], set[wanted[each.flag]])
    words: list[str] = []
    launch = known.launch
    variables = [f"{key}={value}" for key, value in (env or {}).items()]
    inside = launch.environment if launch else None
    begin = launch.begin if launch and inside is None else 0
    for place in range(begin, len(known.argv)):
        if place == inside:
            words += [part for pair in variables for part in ("-e", pair)]
        words += at.get(place, ())
        if not dropped[place]:
            words.append(known.argv[place])
    for flag, typed in wanted.items():
        if flag not in placed:
            words += _as_words(typed, set[typed])
    if inside is None:
        kept = [
            w
            for w in known.argv[:begin]
            if (pair := launchers.assignment(w)) and pair[0] not in (env or {})
        ]
        if kept or variables:
            words = ["env", *kept, *variables, *words]
    return words


def _as_words(flag: str, value: Any) -> list[str]:
    if value is True or value in ("", None):
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value, separators=(",", ":"))]
    return [flag, str(value)]


def _words(command: str | Sequence[str], problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words of the command that starts a server, and what was exported before it."""
    exported: dict[str, str] = {}
    if not isinstance(command, str):
        words = [str(word) for word in command[:_MAX_WORDS]]
        script = launchers.shell_script(words)
        return (
            _words(script, problems)
            if script and len(script) < shell.MAX_TEXT
            else (words, exported)
        )
    if len(command) > shell.MAX_TEXT:
        problems.append("the command line is too long: only its beginning was read")
    commands, closed = shell.split_commands(command)
    if not closed:
        problems.append("a quote in the command line is not closed")
    first: list[str] = []
    for words in commands[:1000]:
        words = words[:_MAX_WORDS]  # noqa: PLW2901 - hostile length, cut before any work
        script = launchers.shell_script(words)
        if script:
            inner, _ = shell.split_commands(script)
            words = next((w for w in inner if launchers.find_launch(w)), words)  # noqa: PLW2901
        if launchers.find_launch(words):
            return words, exported
        if words[0] == "export" or launchers.assignment(words[0]):
            exported.update(pair for word in words if (pair := launchers.assignment(word)))
        first = first or words
    return first, exported


def _read_options(
    engine: str, version: str | None, words: Sequence[str], begin: int, problems: list[str]
) -> tuple[tuple[Given, ...], list[str]]:
    """Options from `words[begin:]`, and the words that belong to none."""
    given: list[Given] = []
    free: list[str] = []
    place = begin
    while place < len(words):
        word = words[place]
        if word == "--":
            free += words[place + 1 :]
            break
        if not _is_option(word):
            free.append(word)
            place += 1
            continue
        at, place = place, place + 1
        name, equals, value = word.partition("=")
        name, dot, key = name.partition(".")
        name = _name(name)
        if level := _LEVEL.fullmatch(name):
            name, equals, value = "-O", "=", level.group(1)
        option = options.find_option(engine, version, name)
        if option.flag == "--compilation-config" and name == "-O" and not dot:
            option = _optimization(engine, version, value if equals else None) or option
        if option.problem and len(problems) < 50:
            problems.append(_shown(option.problem))
        taken: Value
        if equals:
            taken = value
            if option.kind == "switch":
                problems.append(_shown(f"{name} takes no value"))
                taken = value.lower() not in ("false", "0", "no")
        elif option.kind == "switch" and not dot:
            taken = not option.negated
        elif option.kind == "many":
            end = place
            while end < len(words) and not _is_option(words[end]):
                end += 1
            taken = words[place] if end == place + 1 else list(words[place:end])
            place = end
        elif (
            place < len(words)
            and not _is_option(words[place])
            and (option.kind != "optional" or words[place].lower() in _TRUTH)
        ):
            taken = words[place]
            place += 1
        else:
            taken = True
            if option.kind == "value":
                problems.append(_shown(f"{name} needs a value"))
        given.append(
            Given(option.flag, word.partition("=")[0], taken, at, place, key if dot else None)
        )
    return tuple(given), free


def _optimization(engine: str, version: str | None, value: str | None) -> options.Option | None:
    """From vLLM 0.12.0 on ``-O2`` is --optimization-level; before, a level of the compilation."""
    if value is None or not value.isdigit():
        return None
    found = options.find_option(engine, version, "--optimization-level")
    return None if found.problem or version is None else found


def _collect(given: Iterable[Given]) -> dict[str, Any]:
    """Options as a mapping; dotted keys are put into one JSON text."""
    found: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for each in given:
        if each.key is None:
            found[each.flag] = each.value
            nested.pop(each.flag, None)
            continue
        tree = nested.setdefault(each.flag, _json_object(found.get(each.flag)))
        *path, last = each.key.split(".")[:20]
        for part in path:
            inner = tree.setdefault(part, {})
            tree = inner if isinstance(inner, dict) else tree
        tree[last] = _json_value(each.value)
    for flag, value in nested.items():
        found[flag] = json.dumps(value, separators=(",", ":"))
    return found


def _json_object(text: Any) -> dict[str, Any]:
    value = _json_value(text)
    return value if isinstance(value, dict) else {}


def _json_value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _config_file(
    engine: str, version: str | None, path: str, problems: list[str]
) -> dict[str, Any]:
    """Arguments of a YAML file as ``--config`` takes them; {} and a problem when unreadable."""
    import yaml  # noqa: PLC0415 - slow to import, rarely needed

    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                problems.append(_shown(f"{path} is not a regular file"))
                return {}
            loaded = yaml.safe_load(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        problems.append(_shown(f"{path} could not be read as a configuration file"))
        return {}
    if not isinstance(loaded, dict):
        problems.append(_shown(f"{path} holds no options"))
        return {}
    found: dict[str, Any] = {}
    for key, value in loaded.items():
        flag = options.find_option(engine, version, _name(f"--{key}")).flag
        if isinstance(value, bool):
            found[flag] = value
        elif isinstance(value, list):
            found[flag] = [str(each) for each in value]
        elif isinstance(value, dict):
            found[flag] = json.dumps(value, separators=(",", ":"), default=str)
        elif value is not None:
            found[flag] = str(value)
    return found


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_option(word: str) -> bool:
    if word.startswith("--"):
        return len(word) > 2 and " " not in word.partition("=")[0]
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _name(typed: str) -> str:
    return "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed


def _shown(text: str) -> str:
    """Words of a user inside a message: printable, and not long."""
    plain = "".join(char if char.isprintable() else "?" for char in text[:200])
    return plain if len(text) <= 200 else plain + "…"
