"""What is wrong with the flags of a planned command, whatever fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomwatch.engines.commandline import ServerCommand
    from oomwatch.memory.planner import PlanInput
    from oomwatch.records import EngineFacts


def own_flags(given: PlanInput, parsed: ServerCommand) -> list[str]:
    """A sentence for each of the command's own flags that is wrong."""
    from oomwatch.remedies.advice import wrong_flags

    problems = [_with_nearest(problem, given.engine) for problem in parsed.problems[:5]]
    return list(dict.fromkeys((*problems, *wrong_flags(_facts(given, parsed)))))


def refused_flag(given: PlanInput, parsed: ServerCommand) -> str | None:
    """Why the engine refuses one of the command's flags; None where it may take them all.

    Without a version a flag is refused only if no release has it; a fork may have any.
    """
    from oomwatch.engines.flags import check_flag
    from oomwatch.engines.options import find_option, is_memory_option
    from oomwatch.engines.versions import outside
    from oomwatch.remedies.advice import foreign_flags

    if parsed.fork is not None:
        return None
    foreign = foreign_flags(given.engine)
    known = not given.version_assumed and outside(given.engine, given.version) is None
    for flag, value in given.arguments.items():
        if not flag.startswith("--"):
            continue
        if flag in foreign:
            return f"{flag} is no option of {given.engine}: {foreign[flag]}"
        if given.version_assumed and (problem := find_option(given.engine, None, flag).problem):
            return _with_nearest(problem, given.engine)
        listed = given.engine == "vllm" or is_memory_option(given.engine, flag)
        if not known or not listed or isinstance(value, list | dict):
            continue
        typed = "--no-" + flag[2:] if value is False else flag
        reason = check_flag(given.engine, given.version, typed, True if value is False else value)
        if reason is not None:
            return _with_nearest(reason, given.engine)
    return None


def _with_nearest(problem: str, engine: str) -> str:
    """A sentence that begins with a flag, with the flag that was meant where no release has it."""
    from oomwatch.engines.options import nearest_option

    flag, _, said = problem.partition(" ")
    near = nearest_option(engine, flag) if "not an option" in said else None
    return f"{problem}; did you mean {near}?" if near else problem


def _facts(given: PlanInput, parsed: ServerCommand) -> EngineFacts:
    from oomwatch.records import EngineFacts

    return EngineFacts(
        id="plan",
        engine=given.engine,
        version=given.version,
        fork=parsed.fork,
        arguments=given.arguments,
        env=given.env,
    )
