"""`oomwatch plan`: does a server command fit, what does it hold, what would each flag change."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.cli.completing import cards, files
from oomwatch.cli.plan_flags import own_flags, refused_flag
from oomwatch.cli.plan_host import choose_device, read_process
from oomwatch.errors import NoStartError, OomwatchError, SourceError, UsageError

if TYPE_CHECKING:
    from oomwatch.engines.commandline import ServerCommand
    from oomwatch.memory.config_source import Found
    from oomwatch.memory.goals import Answer
    from oomwatch.memory.planner import Plan, PlanInput
    from oomwatch.records import EngineFacts

EXAMPLES: Final = """Exit status: 0 it starts, or the goal is reached; 1 it does not, also where
the release refuses a flag; 2 wrong use; 3 the host or a file could not be read; 4 an internal
fault.

\b
Examples:
  oomwatch plan --gpu h100-80gb -- vllm serve meta-llama/Llama-3.1-8B-Instruct
  oomwatch plan --gpu l40s --model-config ./config.json -- vllm serve my-model --max-model-len 32768
  oomwatch plan --gpu a100-80gb --gpu-count 4 --goal concurrency=64 --context 16384 \\
      --format args -- vllm serve Qwen/Qwen3-32B
  oomwatch plan --pid 4242
"""
_BYTES_PER_GIB: Final = 2**30


class _Gib(click.FloatRange):
    """A number of GiB within bounds. Comparisons let NaN through, so it is refused by itself."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


@click.command("plan", context_settings={"allow_interspersed_args": False}, epilog=EXAMPLES)
@click.option(
    "--model-config",
    metavar="PATH",
    shell_complete=files,
    help="A config.json, or the model's folder; popular models are known by name.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=cards,
    help="The card: h100-80gb, l40s, … or as NVML names it [this host's].",
)
@click.option(
    "--gpu-count",
    type=click.IntRange(1, 65536),
    metavar="N",
    help="GPUs that are there: for --goal, and to refuse commands that need more.",
)
@click.option(
    "--gpu-total-gib",
    type=_Gib(0.5, 8192),
    metavar="GIB",
    help="What CUDA calls the card's total memory, where it is known better.",
)
@click.option(
    "--available-kv-gib",
    type=_Gib(-8192, 8192),
    metavar="GIB",
    help="The log's 'Available KV cache memory': makes tokens and requests exact.",
)
@click.option(
    "--weights-gib",
    type=_Gib(0, 8192),
    metavar="GIB",
    help="The log's 'Model loading took'.",
)
@click.option(
    "--engine-version", metavar="V", help="Version of vLLM or SGLang [the newest that is known]."
)
@click.option(
    "--pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Plan for the engine of this process, from its command and log.",
)
@click.option("--hub", is_flag=True, help="Fetch config.json from the model hub if it is not here.")
@click.option(
    "--goal",
    metavar="GOAL",
    help="What the flags should reach: concurrency=N, concurrency=max or context=max.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Tokens of one request, for --goal concurrency.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "args", "compose", "k8s"]),
    default="text",
    show_default=True,
    help="args, compose and k8s print a configuration to run.",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option(
    "-v", "--verbose", is_flag=True, help="All changes and the table of KV cache formats too."
)
@click.option("--list-models", is_flag=True, help="The models that are known by name, and no more.")
@click.option("--list-gpus", is_flag=True, help="The cards that are known by name, and no more.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colours; NO_COLOR is honoured.",
)
@click.argument("server", nargs=-1, type=click.UNPROCESSED, metavar="-- SERVER COMMAND")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Say whether a server start fits, what it holds, and what each flag would change.

    Write the command after -- as you would run it. Nothing is started and nothing is fetched.
    """
    try:
        starts = run(options)
    except OomwatchError as error:
        from oomwatch.report.sanitize import clean

        click.echo(f"oomwatch: {clean(error, 600)}", err=True)
        if isinstance(error, NoStartError):
            ctx.exit(1)
        ctx.exit(3 if isinstance(error, SourceError) else 2)
    ctx.exit(0 if starts else 1)


def run(options: dict[str, Any]) -> bool:
    """Plan and print; whether the server starts, or the goal is reached."""
    from oomwatch.engines.commandline import parse_command
    from oomwatch.engines.secrets import hide_words
    from oomwatch.memory import config_source, devices, goals, planner

    if options["list_models"] or options["list_gpus"]:
        names = config_source.known_names() if options["list_models"] else []
        names += devices.known_names() if options["list_gpus"] else []
        click.echo("\n".join(names))
        return True
    form = "json" if options["as_json"] else options["form"]
    seen = read_process(options["pid"]) if options["pid"] is not None else None
    words: tuple[str, ...] = options["server"] or ((seen.command or ()) if seen else ())
    if not words:
        raise UsageError(
            "no server command: write it after --, as in `oomwatch plan --gpu l40s -- vllm serve M`"
        )
    version = _version(options["engine_version"])
    words = hide_words(words, version=version)
    parsed = parse_command(words, version=version)
    if parsed.engine not in ("vllm", "sglang"):
        what = f"starts {parsed.engine}" if parsed.engine else "starts no server that plan knows"
        raise UsageError(f"the command {what}; the memory of vLLM and SGLang is modelled")
    found = _find_model(options, parsed)
    given = _build_input(options, parsed, found, seen)
    now = planner.plan(given)
    answer = None
    if options["goal"]:
        goal = goals.parse_goal(options["goal"], options["context"], now.settings.max_model_len)
        answer = goals.reach(given, now, goal)
    refused = refused_flag(given, parsed)
    if form == "json":
        _print_json(given, now, answer, parsed)
    elif form == "text":
        _print_text(options, given, now, answer, parsed=parsed, found=found, refused=refused)
    else:
        _check_that_it_starts(given, now, answer, refused)
        click.echo(_configuration(form, given, now, answer, parsed), nl=False)
    return refused is None and (now.fits if answer is None else answer.reached)


# --------------------------------------------------------------------------------------- inputs
def _version(given: str | None) -> str | None:
    from oomwatch.engines.versions import release

    if given is not None and release(given) is None:
        raise UsageError(f"--engine-version {given[:40]} is no version; write it as in 0.11.0")
    return given


def _find_model(options: dict[str, Any], parsed: ServerCommand) -> Found:
    from oomwatch.memory.config_source import load_model

    return load_model(options["model_config"], parsed.model, hub=options["hub"])


def _build_input(
    options: dict[str, Any], parsed: ServerCommand, found: Found, seen: EngineFacts | None
) -> PlanInput:
    from oomwatch.engines.versions import newest
    from oomwatch.memory.engine_facts import plan_input
    from oomwatch.memory.planner import PlanInput

    version = options["engine_version"] or parsed.version or (seen.version if seen else None)
    assumed = version is None and parsed.fork is None
    if assumed:
        version = newest(parsed.engine or "vllm")
    device = choose_device(options, seen)
    base = plan_input(seen, model=found.model, device=device) if seen else None
    if base is None:
        base = PlanInput(
            model=found.model,
            device=device,
            engine=parsed.engine or "vllm",
            arguments=parsed.arguments,
            env=parsed.env,
        )
    known = dataclasses.replace(base.known, checkpoint_bytes=found.checkpoint_bytes)
    facts: dict[str, int] = {}
    for option, field in (
        ("weights_gib", "weights_bytes"),
        ("available_kv_gib", "kv_available_bytes"),
    ):
        if options[option] is not None:
            facts[field] = round(options[option] * _BYTES_PER_GIB)
    if "kv_available_bytes" in facts:
        facts["kv_rounding_bytes"] = _BYTES_PER_GIB // 200  # logs print two decimals
    known = dataclasses.replace(known, **facts) if facts else known
    return dataclasses.replace(
        base,
        version=version,
        version_assumed=assumed,
        gpu_count=options["gpu_count"],
        known=known,
    )


# --------------------------------------------------------------------------------------- output
def _print_json(given: PlanInput, now: Plan, answer: Answer | None, parsed: ServerCommand) -> None:
    from oomwatch.memory import report, what_if

    data = report.plan_json(given, now, what_if.what_if(given, now), parsed.model)
    data["advice"] = own_flags(given, parsed)
    if answer is not None:
        data["goal"] = report.answer_json(answer)
    click.echo(json.dumps(data))


def _print_text(
    options: dict[str, Any],
    given: PlanInput,
    now: Plan,
    answer: Answer | None,
    *,
    parsed: ServerCommand,
    found: Found,
    refused: str | None,
) -> None:
    from rich.console import Console

    from oomwatch.engines.commandline import rebuilt_words
    from oomwatch.engines.secrets import shell_line
    from oomwatch.memory import text, what_if

    color = options["color"]
    plain = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    console = Console(
        file=sys.stdout,
        force_terminal=True if color == "always" else None,
        no_color=plain,
        highlight=False,
    )
    from oomwatch.report.sanitize import clean

    for problem in own_flags(given, parsed):
        if refused is not None and problem.split()[0] == refused.split()[0]:
            continue  # said below, with what follows from it
        click.echo(f"oomwatch: {clean(problem, 300)}", err=True)
    if refused is not None:
        text.print_refused_flag(console, clean(refused, 200))
    if answer is not None:
        line = clean(shell_line(rebuilt_words(parsed, answer.set), given.engine))
        text.print_answer(console, answer, line)
        if not options["verbose"]:
            console.print(f"\nThe command as it is: {text.verdict(now)}")
            text.print_assumptions(console, answer.plan)
            return
        console.print("\nThe command as it is:")
    text.print_plan(
        console,
        given,
        now,
        name=clean(parsed.model or "model", 120),
        where=clean(found.note or found.where, 200),
        formats=what_if.kv_table(given, now),
        changes=what_if.what_if(given, now),
        fewest=None if now.fits else what_if.fewest_gpus(given, now),
        verbose=options["verbose"],
    )


def _check_that_it_starts(
    given: PlanInput, now: Plan, answer: Answer | None, refused: str | None
) -> None:
    """Raise NoStartError where a configuration to run would be one that does not run."""
    from oomwatch.memory.goals import goal_that_starts
    from oomwatch.memory.text import requests

    chosen = answer.plan if answer is not None else now
    if not chosen.fits:
        goal = goal_that_starts(given, now)
        way = (
            f"add --goal {goal} for flags that do"
            if goal
            else "no combination of flags does on this card"
        )
        raise NoStartError(f"this would not start ({chosen.refusal}): {chosen.refusal_text}; {way}")
    if answer is not None and not answer.reached:
        raise NoStartError(
            f"the goal is out of reach here: {requests(chosen)} at most (--goal concurrency=max)"
        )
    if refused is not None:
        raise NoStartError(f"this would not start: {refused}")


def _configuration(
    form: str, given: PlanInput, now: Plan, answer: Answer | None, parsed: ServerCommand
) -> str:
    """The command as arguments, Compose or Kubernetes."""
    from oomwatch.engines import secrets, shell
    from oomwatch.engines.commandline import parse_command, rebuilt_words
    from oomwatch.memory.deploy import Service, compose, kubernetes

    chosen = answer.plan if answer is not None else now
    words = rebuilt_words(parsed, answer.set if answer is not None else {})
    line = shell.quote(words)
    if not line.isprintable():
        raise UsageError("the server command holds control characters; write it on one line")
    if form == "args":
        return secrets.shell_line(words, given.engine) + "\n"
    again = parse_command(line, version=given.version)
    words = list(again.argv)
    hidden = secrets.placeholders(words, given.engine)
    words = secrets.fill_in(words, given.engine, "${{{}}}" if form == "compose" else "$({})")
    begin = again.launch.arguments if again.launch else 0
    first = again.launch.begin if again.launch else 0
    env = dict(again.env)
    if form == "k8s":  # what $(NAME) in the arguments stands for
        env |= {name: secrets.HIDDEN for place, name in hidden.items() if place >= first}
    service = Service(
        engine=given.engine,
        version=None if given.version_assumed else given.version,
        program=words[first:begin],
        arguments=words[begin:],
        env=env,
        gpus=chosen.settings.gpus,
    )
    return compose(service) if form == "compose" else kubernetes(service)
