"""What is left of engines that do not run any more, and who says how they ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from oomwatch.errors import OomwatchError
from oomwatch.records import SourceStatus
from oomwatch.units import format_duration

if TYPE_CHECKING:
    from oomwatch.cli.gather import Gatherer
    from oomwatch.discovery import DiscoveredEngine
    from oomwatch.sources.ended import EndedEngine

_RECENT_SECONDS: Final = 86400.0


def add_ended(gatherer: Gatherer, engines: list[DiscoveredEngine]) -> None:
    """Where no server runs, read what is left of the last one; else name those that just ended."""
    from oomwatch.sources.ended import find_ended

    denied: list[str] = []
    places = gatherer.options.places
    ended = find_ended(
        docker_root=places.docker_root,
        systemd_root=places.systemd_root,
        copies=places.copies,
        denied=denied,
    )
    gatherer.sources += [SourceStatus("ended engines", "warning", reason) for reason in denied[:1]]
    if any(not engine.orphan for engine in engines):
        recent = [one for one in ended if time.time() - one.at < _RECENT_SECONDS and _failed(one)]
        for one in recent[:3]:
            gatherer.sources.append(
                SourceStatus(
                    f"{one.kind} {one.name}", "warning", f"{_how(one)}; {_reader(one)} reads it"
                )
            )
        return
    if not ended:
        if not engines:
            gatherer.sources.append(
                SourceStatus(
                    "engines",
                    "not_available",
                    "no inference server runs here, and no container, service or kept output of "
                    "one that ended was found; give its log: --log FILE, --unit NAME, "
                    "--container NAME",
                )
            )
        return
    last, *others = ended
    if engines and last.kind == "copy" and gatherer.logs:
        return  # what the orphans' own log says is about them
    try:
        if engines and last.kind == "copy":  # `oomwatch run` went with the server that it ran
            gatherer.add_log_file(last.name, engines[0].recorded.id)
        else:
            gatherer.add_ended(last)
        said = f"no server runs here now; the last one, {_named(last)}, {_how(last)} and was read"
    except OomwatchError as error:
        said = f"no server runs here now; the last one, {_named(last)}, {_how(last)}: {error}"
    gatherer.sources.append(SourceStatus("engines", "warning", said))
    for one in others[:3]:
        gatherer.sources.append(
            SourceStatus(f"{one.kind} {one.name}", "ok", f"{_how(one)}; {_reader(one)} reads it")
        )


def _failed(ended: EndedEngine) -> bool:
    return ended.exit is not None and ended.exit.exit_code not in (0, 143, 130)


def _named(ended: EndedEngine) -> str:
    return (
        f"the output kept in {ended.name}" if ended.kind == "copy" else f"{ended.kind} {ended.name}"
    )


def _how(ended: EndedEngine) -> str:
    ago = f"{format_duration(max(1.0, time.time() - ended.at))} ago"
    if ended.exit is None:
        return f"ended {ago}"
    code = "" if ended.exit.exit_code is None else f" with status {ended.exit.exit_code}"
    memory = ", killed for memory" if ended.exit.oom_killed else ""
    return f"ended {ago}{code}{memory}"


def _reader(ended: EndedEngine) -> str:
    option = {"container": "--container", "unit": "--unit", "copy": "--log"}[ended.kind]
    return f"{option} {ended.name}"
