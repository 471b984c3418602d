"""Remedies as text to paste: an argument line, variables, Compose or Kubernetes YAML, Python.

Only printed, never applied. What is rendered is the first remedy of flags or variables that is
predicted to be enough alone; where none is, the first with up to two that combine with it. Remedies
are free of contradiction before they come here. A secret of the old command, hidden by now, becomes
a variable that whoever pastes the answer has to set.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from oomwatch.engines import flags, secrets, shell
from oomwatch.engines.commandline import ServerCommand, parse_command, rebuilt_words
from oomwatch.errors import UsageError
from oomwatch.records import EngineFacts, Remedy
from oomwatch.selection import set_together

FORMATS: Final = ("args", "env", "compose", "k8s", "python")


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What is to be changed, all together."""

    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared_memory: bool = False

    def __bool__(self) -> bool:
        return bool(self.set or self.unset or self.env or self.shared_memory)


def combined(remedies: Sequence[Remedy]) -> Changes:
    """The settings of the remedies that are set together."""
    chosen = set_together(remedies)
    return Changes(
        set={flag: value for remedy in chosen for flag, value in remedy.set.items()},
        unset=tuple(dict.fromkeys(flag for remedy in chosen for flag in remedy.unset)),
        env={name: value for remedy in chosen for name, value in remedy.env.items()},
        shared_memory=bool(remedies) and remedies[0].id == "more-shared-memory",
    )


def render(remedies: Sequence[Remedy], engine: EngineFacts, fmt: str) -> str:
    """The settings as text in one of `FORMATS`, without a last line end; "" if there are none.

    Raises UsageError for another format, or for ``python`` with an engine that is not vLLM.
    """
    writer = _WRITERS.get(fmt)
    if writer is None:
        raise UsageError(f"unknown format {fmt!r}; choose one of {', '.join(FORMATS)}")
    return writer(combined(remedies), engine)


def flags_alone(remedies: Sequence[Remedy]) -> str:
    """Only the changed flags, to append to a command of the user's own; "" if there are none."""
    return shell.quote(_flag_words(combined(remedies)))


def absence(remedies: Sequence[Remedy], fmt: str) -> str:
    """Why `render` has nothing for this format, as a phrase."""
    changes = combined(remedies)
    if not remedies:
        return "there is no remedy here"
    if fmt == "env" and changes:
        return "no remedy here is an environment variable; --format args prints the flags"
    if changes.env:
        return "no remedy here is a flag; --format env prints the variables"
    if changes.unset:
        return f"the remedy is to remove {' '.join(changes.unset)}"
    return "no remedy here is a flag or an environment variable"


def _args(changes: Changes, engine: EngineFacts) -> str:
    if not (changes.set or changes.unset or changes.env):
        return ""
    command = _command(engine)
    if command is not None:
        words = rebuilt_words(command, changes.set, changes.unset, changes.env)
        return secrets.shell_line(words, engine.engine)
    return shell.quote(_flag_words(changes))


def _env(changes: Changes, _engine: EngineFacts) -> str:
    return "\n".join(f"{name}={value}" for name, value in changes.env.items())


def _compose(changes: Changes, engine: EngineFacts) -> str:
    if not changes:
        return ""
    service: dict[str, Any] = {}
    if changes.shared_memory:
        service["shm_size"] = "16gb"
    if changes.env:
        service["environment"] = dict(changes.env)
    if changes.set or changes.unset:
        words, _ = _container_words(changes, engine)
        service["command"] = secrets.fill_in(words, engine.engine, "${{{}}}")
    return _yaml({"services": {_service(engine): service}})


def _kubernetes(changes: Changes, engine: EngineFacts) -> str:
    if not changes:
        return ""
    container: dict[str, Any] = {"name": _service(engine)}
    pod: dict[str, Any] = {"containers": [container]}
    env: list[dict[str, Any]] = []
    if changes.set or changes.unset:
        words, whole = _container_words(changes, engine)
        container["command" if whole else "args"] = secrets.fill_in(words, engine.engine, "$({})")
        names = dict.fromkeys(secrets.placeholders(words, engine.engine).values())
        env += [
            {"name": n, "valueFrom": {"secretKeyRef": {"name": _service(engine), "key": n}}}
            for n in names
        ]
    env += [{"name": n, "value": v} for n, v in changes.env.items()]
    if env:
        container["env"] = env
    if changes.shared_memory:
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - that path is the point
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    return _yaml({"spec": {"template": {"spec": pod}}})


def _python(changes: Changes, engine: EngineFacts) -> str:
    if engine.engine is not None and not engine.engine.startswith("vllm"):
        raise UsageError(f"--format python is for vLLM; this is {engine.engine}: use --format args")
    lines = [f"# before importing vllm: os.environ[{n!r}] = {v!r}" for n, v in changes.env.items()]
    lines += [f"# remove: {_keyword(flag)}" for flag in changes.unset]
    for flag, value in changes.set.items():
        off = flag.startswith("--no-")
        name = _keyword("--" + flag.removeprefix("--no-") if off else flag)
        lines.append(f"{name}={'False' if off else repr(_python_value(flag, value))},")
    return "\n".join(lines)


def _keyword(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _python_value(flag: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    number = flags.as_number(value)
    if flag == "--cuda-graph-sizes":
        return [number]
    if number is not None:
        return number
    if str(value).startswith(("{", "[")):
        try:
            return json.loads(str(value))
        except ValueError:
            return value
    return value


def _command(engine: EngineFacts) -> ServerCommand | None:
    """The old command, if it is known and starts a server."""
    if not engine.command:
        return None
    parsed = parse_command(engine.command, version=engine.version)
    return parsed if parsed.engine is not None and parsed.launch is not None else None


def _container_words(changes: Changes, engine: EngineFacts) -> tuple[list[str], bool]:
    """Words for a container, and whether they include the program.

    A `docker run` is cut down to what follows the image, which its entry point takes.
    """
    command = _command(engine)
    if command is None or command.launch is None:
        return _flag_words(changes), False
    image = command.launch.environment
    if image is None:
        return rebuilt_words(command, changes.set, changes.unset), True
    rest = list(command.argv[image + 1 :])
    inside = parse_command(rest, version=engine.version)
    whole = inside.launch is not None
    if not whole:
        inside = parse_command(rest, engine=command.engine or "vllm", version=engine.version)
    return rebuilt_words(inside, changes.set, changes.unset), whole


def _flag_words(changes: Changes) -> list[str]:
    words: list[str] = []
    for flag, value in changes.set.items():
        words += [flag] if value is True else [flag, str(value)]
    return words


def _service(engine: EngineFacts) -> str:
    return re.sub(r"[^a-z0-9-]", "-", (engine.engine or "server").lower())[:40] or "server"


def _yaml(tree: Mapping[str, Any]) -> str:
    import yaml  # noqa: PLC0415 - slow to import, needed for two formats

    return yaml.safe_dump(dict(tree), sort_keys=False, width=100, allow_unicode=False).rstrip("\n")


_WRITERS: Final[Mapping[str, Callable[[Changes, EngineFacts], str]]] = {
    "args": _args,
    "env": _env,
    "compose": _compose,
    "k8s": _kubernetes,
    "python": _python,
}
