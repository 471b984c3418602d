"""Reads the log of a container or pod: the node's own files first, then the runtime's command.

Where the files are (roots are settings):

=========== ==================================================================================
Docker      ``containers/ID/config.v2.json`` (name, command, start), ``ID-json.log[.N[.gz]]``
Podman      ``overlay-containers/containers.json`` (names), ``ID/userdata/ctr.log``, CRI format
containerd  nerdctl's ``HASH/names/NS/NAME`` (id), ``HASH/containers/NS/ID/ID-json.log``
Kubernetes  ``/var/log/pods/NS_NAME_UID/CONTAINER/N.log`` and rotated ``N.log.TIME[.gz]``
=========== ==================================================================================

By default the last start: Docker's file goes on over restarts, so lines before its start are left
out; Kubernetes numbers its files by restart.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomwatch.errors import NoDataError, PermissionDeniedError, SourceUnavailable, UsageError
from oomwatch.records import LogLine
from oomwatch.sources.logfile import OpenedLog, read_log
from oomwatch.sources.logformat_child import Failed, ask_child, read_child
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.runtimes import RUNTIMES, note_silence, why_unknown

DOCKER_ROOT: Final = "/var/lib/docker"
PODMAN_ROOT: Final = "/var/lib/containers/storage"
NERDCTL_ROOT: Final = "/var/lib/nerdctl"
PODS_ROOT: Final = "/var/log/pods"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")


_NO_CLUSTER: Final = "localhost:8080"
"""Where kubectl looks without a configuration: nobody serves a cluster there."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """What the runtime's own files, or its inspect command, say about a container."""

    id: str
    name: str
    command: tuple[str, ...] | None
    env: Mapping[str, str]
    started_at: float | None
    files: tuple[Path, ...] = ()
    """Oldest first."""


# ---------------------------------------------------------------- containers
def read_container(
    name: str,
    *,
    last_start: bool = True,
    docker_root: str = DOCKER_ROOT,
    podman_root: str = PODMAN_ROOT,
    nerdctl_root: str = NERDCTL_ROOT,
    full: bool = False,
    zone: datetime.tzinfo | None = None,
) -> OpenedLog:
    """The log of a container by its name, or id or the beginning of it.

    Raises UsageError for what is no name, NoDataError where it has logged nothing,
    PermissionDeniedError or SourceUnavailable where it cannot be read.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:100]!a} is no name of a container: give its name or id")
    denied: list[str] = []
    silent: dict[str, str] = {}
    for found in (
        _find_docker(Path(docker_root), denied),
        _find_podman(Path(podman_root), denied),
        _find_nerdctl(Path(nerdctl_root), denied),
    ):
        for container in found:
            if _is_called(container, name) and container.files:
                since = container.started_at if last_start else None
                lines = _read_files(container.files, since, zone, full=full)
                return _opened(container, lines, str(container.files[-1]))
    for tool in RUNTIMES:
        if shutil.which(tool):
            log = _ask_runtime(
                tool, name, zone, last_start=last_start, full=full, denied=denied, silent=silent
            )
            if log is not None:
                return log
    if denied:
        raise PermissionDeniedError(f"container {name}: {denied[0]}; try sudo")
    raise SourceUnavailable(
        f"container {name}: {why_unknown(silent, (docker_root, podman_root, nerdctl_root))}; "
        "give its log as a file with --log"
    )


def _is_called(container: _Container, name: str) -> bool:
    return container.name == name or (len(name) >= 4 and container.id.startswith(name))


def _opened(container: _Container, lines: Iterator[LogLine], origin: str) -> OpenedLog:
    return OpenedLog(
        container.name, lines, origin, command=container.command, env=container.env, zone="UTC"
    )


def _find_docker(root: Path, denied: list[str]) -> Iterator[_Container]:
    for folder in _list(root / "containers", denied):
        config = _read_json(folder / "config.v2.json", denied)
        if not isinstance(config, dict):
            continue
        identity = str(config.get("ID") or folder.name)
        files = [*folder.glob(f"{identity}-json.log"), *folder.glob(f"{identity}-json.log.*")]
        yield _from_inspect(config, identity, tuple(sorted(files, key=_rotation, reverse=True)))


def _rotation(path: Path) -> int:
    """0 for the file being written, else how many rotations ago it was."""
    match = re.search(r"\.log\.(\d{1,6})(?:\.gz)?$", path.name)
    return int(match[1]) if match else 0


def _find_podman(root: Path, denied: list[str]) -> Iterator[_Container]:
    base = root / "overlay-containers"
    listed = _read_json(base / "containers.json", denied)
    for entry in listed if isinstance(listed, list) else ():
        identity = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(identity, str) or not _NAME.fullmatch(identity):
            continue
        folder = base / identity / "userdata"
        spec = _read_json(folder / "config.json", denied)
        process = spec.get("process") if isinstance(spec, dict) else None
        process = process if isinstance(process, dict) else {}
        names = entry.get("names")
        log = folder / "ctr.log"
        yield _Container(
            identity,
            str(names[0]) if isinstance(names, list) and names else identity[:12],
            _strings(process.get("args")),
            _environment(process.get("env")),
            None,
            (log,) if log.is_file() else (),
        )


def _find_nerdctl(root: Path, denied: list[str]) -> Iterator[_Container]:
    for hashed in _list(root, denied):
        for namespace in _list(hashed / "names", denied):
            for entry in _list(namespace, denied):
                try:
                    identity = entry.read_text(encoding="utf-8").strip()
                except (OSError, ValueError):
                    continue
                log = hashed / "containers" / namespace.name / identity / f"{identity}-json.log"
                if _NAME.fullmatch(identity) and log.is_file():
                    yield _Container(identity, entry.name, None, {}, None, (log,))


def _from_inspect(config: dict[str, Any], identity: str, files: tuple[Path, ...]) -> _Container:
    """Docker's config.v2.json and the answer of `inspect` have the same names."""
    inner = config.get("Config")
    inner = inner if isinstance(inner, dict) else {}
    path, args = config.get("Path"), config.get("Args")
    if isinstance(path, str) and path:
        command = (path, *(_strings(args) or ()))
    else:
        command = (*(_strings(inner.get("Entrypoint")) or ()), *(_strings(inner.get("Cmd")) or ()))
    state = config.get("State")
    started = state.get("StartedAt") if isinstance(state, dict) else None
    at = Clock(datetime.UTC).read_dated(started) if isinstance(started, str) else None
    return _Container(
        identity,
        str(config.get("Name") or identity[:12]).lstrip("/"),
        command or None,
        _environment(inner.get("Env")),
        at if at is not None and at > 0 else None,  # "0001-01-01T00:00:00Z": never started
        files,
    )


def _ask_runtime(
    tool: str,
    name: str,
    zone: datetime.tzinfo | None,
    *,
    last_start: bool,
    full: bool,
    denied: list[str],
    silent: dict[str, str],
) -> OpenedLog | None:
    """The log by `docker` or `podman`; None where the runtime does not have the container.

    A runtime that does not answer is noted in `silent`, with what its command says.
    """
    try:
        rows = json.loads(ask_child([tool, "inspect", "--type", "container", name]))
        container = _from_inspect(rows[0], str(rows[0].get("Id") or rows[0].get("ID") or ""), ())
        since = container.started_at if last_start else None
        window = ["--since", f"{since:.9f}"] if since is not None else []
        command = [tool, "logs", "--timestamps", *window, name]
        clock = Clock(zone, time.time())
        lines = read_child(command, container.name, clock, full=full, errors_too=True)
    except (Failed, SourceUnavailable) as error:
        note_silence(tool, str(error), denied, silent)
        return None
    except (ValueError, LookupError, AttributeError, TypeError):  # no JSON, or of another shape
        return None
    if lines is None:
        raise NoDataError(f"container {name}: it has logged nothing since its last start")
    return _opened(container, lines, f"{tool} logs")


# ---------------------------------------------------------------- pods
def read_pod(
    name: str,
    *,
    last_start: bool = True,
    pods_root: str = PODS_ROOT,
    full: bool = False,
    zone: datetime.tzinfo | None = None,
) -> OpenedLog:
    """The log of ``NAMESPACE/POD`` or ``NAMESPACE/POD/CONTAINER``.

    Of several containers, the one that wrote most is taken; `notes` names the others.

    Raises as `read_container` does.
    """
    parts = name.split("/")
    if len(parts) not in {2, 3} or not all(_NAME.fullmatch(part) for part in parts):
        raise UsageError(f"{name[:200]!a} is no pod: give NAMESPACE/POD or NAMESPACE/POD/CONTAINER")
    namespace, pod, container = (*parts, None)[:3]
    assert namespace is not None  # noqa: S101 - two parts at least
    assert pod is not None  # noqa: S101
    denied: list[str] = []
    folders = [
        folder
        for folder in _list(Path(pods_root), denied)
        if folder.name.startswith(f"{namespace}_{pod}_")
    ]
    # A pod that was made anew has another uid: the one written to last counts.
    for folder in sorted(folders, key=_changed_at, reverse=True):
        logs = {child.name: _pod_files(child, denied) for child in _list(folder, denied)}
        logs = {key: files for key, files in logs.items() if files and container in {None, key}}
        if logs:
            chosen = max(logs, key=lambda key: sum(_size(path) for path in logs[key]))
            files = logs[chosen]
            if last_start:
                files = [path for path in files if _restart(path) == _restart(files[-1])]
            lines = _read_files(files, None, zone, full=full)
            others = sorted(key for key in logs if key != chosen)
            return OpenedLog(
                f"{namespace}/{pod}/{chosen}",
                lines,
                str(files[-1]),
                zone="UTC",
                notes=_other_containers(chosen, others),
            )
    if shutil.which("kubectl"):
        return _ask_kubectl(namespace, pod, container, zone, full=full)
    if denied:
        raise PermissionDeniedError(f"pod {name}: {denied[0]}; try sudo")
    raise SourceUnavailable(
        f"pod {name}: not found under {pods_root}, and no kubectl here; run this on its node, or "
        f"give `kubectl logs -n {namespace} {pod}` as a file with --log"
    )


def _pod_files(folder: Path, denied: list[str]) -> list[Path]:
    """The log files of a container, oldest first: ``0.log.20250312-060916.gz``, ``0.log``."""
    files = [path for path in _list(folder, denied) if re.match(r"\d{1,6}\.log", path.name)]
    return sorted(files, key=lambda path: (_restart(path), path.suffix == ".log", path.name))


def _restart(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _other_containers(chosen: str, others: list[str]) -> tuple[str, ...]:
    if not others:
        return ()
    return (f"container {chosen} of the pod; it also has {', '.join(others)}",)


def _ask_kubectl(
    namespace: str, pod: str, container: str | None, zone: datetime.tzinfo | None, *, full: bool
) -> OpenedLog:
    where = ["--namespace", namespace]
    try:
        specs = _container_specs(ask_child(["kubectl", "get", "pod", pod, *where, "-o", "json"]))
        chosen = container or next(iter(specs), "")
        spec = specs.get(chosen, {})
        name = f"{namespace}/{pod}/{chosen}"
        for previous in ([], ["--previous"]):  # one that waits to be restarted has logged nothing
            command = ["kubectl", "logs", pod, *where, "-c", chosen, "--timestamps", *previous]
            lines = read_child(command, name, Clock(zone, time.time()), full=full)
            if lines is not None:
                start = (
                    *(_strings(spec.get("command")) or ()),
                    *(_strings(spec.get("args")) or ()),
                )
                others = [key for key in specs if key != chosen]
                notes = _other_containers(chosen, others)
                env = {
                    str(row["name"]): str(row["value"])
                    for row in spec.get("env") or ()
                    if isinstance(row, dict) and {"name", "value"} <= row.keys()
                }
                return OpenedLog(
                    name, lines, "kubectl logs", start or None, env, zone="UTC", notes=notes
                )
    except Failed as error:
        said = f"kubectl says: {error}"
        if _NO_CLUSTER in str(error):
            said = "kubectl knows of no cluster here (set KUBECONFIG); give its log with --log"
        raise SourceUnavailable(f"pod {namespace}/{pod}: {said}") from None
    raise NoDataError(f"pod {namespace}/{pod}: it has logged nothing")


def _container_specs(text: str) -> dict[str, dict[str, Any]]:
    try:
        rows = json.loads(text)["spec"]["containers"]
        return {str(row["name"]): row for row in rows}
    except (ValueError, LookupError, TypeError):
        raise Failed("its answer about the pod cannot be read") from None


# ---------------------------------------------------------------- files
def _read_files(
    files: Iterable[Path], since: float | None, zone: datetime.tzinfo | None, *, full: bool
) -> Iterator[LogLine]:
    """The lines of rotated files, one after another; those before `since` are left out."""
    for path in files:
        if since is not None and _changed_at(path) < since - 1:
            continue
        for line in read_log(str(path), full=full, zone=zone):
            if since is None or line.at is None or line.at >= since - 1:
                yield line


def _list(folder: Path, denied: list[str]) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except PermissionError:
        denied.append(f"{folder} may not be read")
    except OSError:
        pass
    return []


def _read_json(path: Path, denied: list[str]) -> Any:
    try:
        return json.loads(path.read_bytes())
    except PermissionError:
        denied.append(f"{path} may not be read")
    except (OSError, ValueError):
        pass
    return None


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _strings(value: Any) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list) else None


def _environment(value: Any) -> dict[str, str]:
    """``NAME=value`` rows as a mapping."""
    rows = [row.partition("=") for row in _strings(value) or ()]
    return {name: text for name, sign, text in rows if sign}
