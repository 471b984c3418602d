"""What is detected and when: one section per kind of trigger, named as the trigger is."""

# ruff: noqa: RUF009 - the functions of `fields` return dataclass fields

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

from oomwatch.config.fields import Problem, count, duration, key, rate, section, share, size, switch
from oomwatch.config.values import Choice

Mode = Literal["alert", "observe", "off"]

_HOLD: Final = "How long a level must last before it counts."
_CLEAR: Final = "Where it is over again."


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Something to detect."""

    mode: Mode = key(
        Choice(("alert", "observe", "off")),
        "alert",
        "alert opens an incident; observe records that it would have; off does not look.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRule(Rule):
    """Something that must last before it counts."""

    hold_seconds: float = duration("1min", "How long it must last before it counts.", "0s", "1d")


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionStorm(Rule):
    """Requests are preempted or retracted over and over."""

    warn_per_minute: float = rate(10.0, "Preemptions a minute that warn.")
    critical_per_minute: float = rate(60.0, "Preemptions a minute that are critical.")
    clear_per_minute: float = rate(2.0, _CLEAR)
    hold_seconds: float = duration("30s", _HOLD, "0s", "1d")

    def problems(self) -> Iterator[Problem]:
        """Levels that rise."""
        if not self.clear_per_minute < self.warn_per_minute <= self.critical_per_minute:
            yield (
                "warn_per_minute",
                "must lie above clear_per_minute and not above critical_per_minute",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class HostHeadroom(Rule):
    """Host memory runs out, or what the engine's control group may still take."""

    warn_ratio: float = share(0.1, "Available share of the host's memory or limit that warns.")
    critical_ratio: float = share(0.05, "Available share that is critical.")
    clear_ratio: float = share(0.15, _CLEAR)
    hold_seconds: float = duration("30s", _HOLD, "0s", "1d")

    def problems(self) -> Iterator[Problem]:
        """Levels that fall."""
        if not self.critical_ratio <= self.warn_ratio < self.clear_ratio:
            yield "warn", "must lie below clear and not below critical"


@dataclasses.dataclass(frozen=True, slots=True)
class GpuHeadroom(Rule):
    """A GPU has little memory left. That engines take most of it at start is normal."""

    warn_bytes: int = size("512MiB", "Free memory of one GPU that warns.", 0)
    critical_bytes: int = size("128MiB", "Free memory that is critical.", 0)
    clear_bytes: int = size("1GiB", _CLEAR, 0)
    hold_seconds: float = duration("30s", _HOLD, "0s", "1d")

    def problems(self) -> Iterator[Problem]:
        """Levels that fall."""
        if not self.critical_bytes <= self.warn_bytes < self.clear_bytes:
            yield "warn", "must lie below clear and not below critical"


@dataclasses.dataclass(frozen=True, slots=True)
class KvSaturation(Rule):
    """The KV cache is full."""

    warn_ratio: float = share(0.9, "Used share of the KV cache that warns.")
    critical_ratio: float = share(0.98, "Used share that is critical.")
    clear_ratio: float = share(0.8, _CLEAR)
    hold_seconds: float = duration("30s", _HOLD, "0s", "1d")

    def problems(self) -> Iterator[Problem]:
        """Levels that rise."""
        if not self.clear_ratio < self.warn_ratio <= self.critical_ratio:
            yield "warn", "must lie above clear and not above critical"


@dataclasses.dataclass(frozen=True, slots=True)
class ZombieEngine(Rule):
    """The port answers, but the engine behind it is gone or stands still."""

    hold_seconds: float = duration(
        "3min", "How long nothing must have moved; a long prefill takes a while.", "1min", "1d"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RestartLoop(Rule):
    """An engine starts again and again and never serves."""

    starts: int = count(3, "How many starts that failed make a loop.", 2, 1000)
    window_seconds: float = duration("15min", "The time within which they fall.", "1min", "1d")


@dataclasses.dataclass(frozen=True, slots=True)
class DriverUnresponsive(Rule):
    """A call into the NVIDIA driver does not come back."""

    after_seconds: float = duration("10s", "How long a call may take.", "1s", "1h")


@dataclasses.dataclass(frozen=True, slots=True)
class OrphanHolder(HeldRule):
    """A process holds GPU memory and the engine that it belonged to is gone."""

    min_size_bytes: int = size("256MiB", "Less than this is let be.", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class NeighbourGrowth(Rule):
    """A process that is no part of an engine takes more and more of the engine's GPU."""

    min_growth_bytes: int = size("1GiB", "By how much it must have grown.")
    window_seconds: float = duration("10min", "The time within which it grew.", "1min", "1d")


@dataclasses.dataclass(frozen=True, slots=True)
class DetectConfig:
    """What opens an incident. A level that warns is left only at a lower one."""

    enabled: bool = switch(True, "Whether anything is detected; if not, the agent only records.")
    flap_count: int = count(
        3, "A condition that comes and goes so often within `flap_window` is one incident.", 2, 100
    )
    flap_window_seconds: float = duration("10min", "See `flap_count`.", "1min", "1d")
    log_failure: Rule = section(Rule, "The engine's log says that it failed.")
    process_exit: Rule = section(Rule, "A process of an engine ended on its own, or was killed.")
    cgroup_oom: Rule = section(Rule, "A control group reached its limit and a process was killed.")
    kernel_oom: Rule = section(Rule, "The kernel ran out of memory and killed a process.")
    gpu_lost: Rule = section(Rule, "A GPU has fallen off the bus.")
    kv_saturation: KvSaturation = section(KvSaturation)
    preemption_storm: PreemptionStorm = section(PreemptionStorm)
    never_fits: HeldRule = section(
        HeldRule, "A request waits that can never fit: nothing runs, and it does not move."
    )
    zombie_engine: ZombieEngine = section(ZombieEngine)
    restart_loop: RestartLoop = section(RestartLoop)
    driver_unresponsive: DriverUnresponsive = section(DriverUnresponsive)
    orphan_holder: OrphanHolder = section(OrphanHolder)
    neighbour_growth: NeighbourGrowth = section(NeighbourGrowth)
    host_headroom: HostHeadroom = section(HostHeadroom)
    gpu_headroom: GpuHeadroom = section(GpuHeadroom)
    forecast_kv: Rule = section(Rule, "The KV cache will be full within `forecast.kv_horizon`.")
    forecast_gpu: Rule = section(
        Rule, "A GPU's memory will be used up within `forecast.gpu_horizon`."
    )
    forecast_host: Rule = section(
        Rule,
        "Host memory, or a control group's limit, will be used up within `forecast.host_horizon`.",
    )
