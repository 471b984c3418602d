"""`oomwatch demo`: the main job on the embedded recording, then on this host if it has GPUs."""

from __future__ import annotations

from typing import Final

import click

INTRODUCTION: Final = """\
A server of short chats met one prompt of 96,211 tokens. This is what was recorded (its log, the
GPU's memory, the engine's counters), and what oomwatch makes of it:
"""
THIS_HOST: Final = "\nAnd this is what runs here now:\n"
NO_GPU: Final = "\nNo NVIDIA GPU can be seen from here; `oomwatch check` says why.\n"


@click.command("demo", epilog="\b\nExamples:\n  oomwatch demo")
def command() -> None:
    """Diagnose an embedded recording, then this host if it has GPUs. Changes nothing."""
    from oomwatch.cli.diagnose import run_diagnosis
    from oomwatch.cli.options import Options
    from oomwatch.cli.rendering import render
    from oomwatch.demo import demo_recording
    from oomwatch.errors import OomwatchError

    click.echo(INTRODUCTION)
    recorded = run_diagnosis(Options(recordings=(str(demo_recording()),)))
    click.echo(render(recorded, "text", {}).rstrip("\n"))
    try:
        here = run_diagnosis(Options())
    except OomwatchError:
        click.echo(NO_GPU, nl=False)
        return
    if here.gpus:
        click.echo(THIS_HOST)
        click.echo(render(here, "text", {}).rstrip("\n"))
    else:
        click.echo(NO_GPU, nl=False)
