"""`oomwatch plan`: does a server command fit, how much does it hold, what would each flag change."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command(name="plan", context_settings={"ignore_unknown_options": False})
@click.option("--model-config", type=click.Path(), help="config.json, or a folder with one.")
@click.option("--gpu", help="Card: h100-80gb, l40s, … or its NVML name.")
@click.option("--gpu-count", type=click.IntRange(1, 100_000), help="GPUs that are there.")
@click.option("--gpu-total-gib", type=click.FloatRange(0.5, 4096), help="Memory CUDA reports.")
@click.option("--available-kv-gib", type=float, help="Printed available KV cache memory.")
@click.option("--weights-gib", type=click.FloatRange(0, 4096), help="Printed size of the weights.")
@click.option("--engine-version", help="Version of vLLM or SGLang.")
@click.option("--json", "as_json", is_flag=True, help="JSON (oomwatch.plan/1).")
@click.argument("server", nargs=-1, type=click.UNPROCESSED)
def command(**options: Any) -> None:
    """Plan a server start."""
    from oomwatch.engines.commandline import parse_command
    from oomwatch.memory import config_source, planner, report, what_if
    from oomwatch.memory.budget import Known
    from oomwatch.memory.devices import find_device
    from oomwatch.units import GIB
    import dataclasses

    parsed = parse_command(options["server"])
    model = config_source.load_model(options["model_config"], parsed.model).model
    device = find_device(options["gpu"])
    if options["gpu_total_gib"]:
        device = dataclasses.replace(
            device, total_bytes=int(options["gpu_total_gib"] * GIB), measured=True
        )
    gib = lambda key: None if options[key] is None else int(options[key] * GIB)
    given = planner.PlanInput(
        model=model,
        device=device,
        engine=parsed.engine,
        version=options["engine_version"] or parsed.version,
        arguments=parsed.arguments,
        env=parsed.env,
        gpu_count=options["gpu_count"],
        known=Known(weights_bytes=gib("weights_gib"), kv_available_bytes=gib("available_kv_gib")),
    )
    now = planner.plan(given)
    print(json.dumps(report.plan_json(given, now, what_if.what_if(given, now), parsed.model)))
