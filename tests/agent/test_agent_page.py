"""docs/agent.md against the configuration: what is detected is named, with the defaults there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from oomwatch.config import Config

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "agent.md").read_text("utf-8").split())
DETECT = Config().detect
RULES = sorted(
    field.name
    for field in dataclasses.fields(DETECT)
    if dataclasses.is_dataclass(getattr(DETECT, field.name))
)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_on_the_page(rule):
    assert f"`detect.{rule}`" in PAGE


def test_its_figures_are_the_defaults():
    config = Config()
    full, storm = DETECT.kv_saturation, DETECT.preemption_storm
    forecast, incidents = config.forecast, config.incidents
    shown = [
        f"{full.warn_ratio * 100:.0f} % full at its peaks",
        f"stays {full.critical_ratio * 100:.0f} % full (critical)",
        f"{storm.warn_per_minute:.0f} ({storm.critical_per_minute:.0f}) preemptions a minute",
        f"has not come back for {DETECT.driver_unresponsive.after_seconds:.0f} s",
        f"for {DETECT.zombie_engine.hold_seconds / 60:.0f} min; a long prefill",
        f"holds {DETECT.orphan_holder.min_size_bytes >> 20} MiB",
        f"grown by {DETECT.neighbour_growth.min_growth_bytes >> 30} GiB within "
        f"{DETECT.neighbour_growth.window_seconds / 60:.0f} min",
        f"less than {DETECT.gpu_headroom.warn_bytes >> 20} MiB "
        f"({DETECT.gpu_headroom.critical_bytes >> 20} MiB)",
        f"less than {DETECT.host_headroom.warn_ratio * 100:.0f} % "
        f"({DETECT.host_headroom.critical_ratio * 100:.0f} %)",
        f"within {forecast.kv_horizon_seconds / 60:.0f} min, "
        f"{forecast.gpu_horizon_seconds / 60:.0f} min, {forecast.host_horizon_seconds / 3600:.0f} h",
        f"samples of {incidents.window_before_seconds / 60:.0f} min before and "
        f"{incidents.window_after_seconds / 60:.0f} min after",
        f"has served for {incidents.close_after_seconds:.0f} s",
        f"{incidents.log_excerpt_bytes >> 10} KiB of the log",
    ]
    assert [figure for figure in shown if figure not in PAGE] == []
