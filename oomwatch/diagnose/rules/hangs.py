"""Parts of a server that no longer answer each other: none of them says why."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.frames import telling_frame
from oomwatch.diagnose.rules.findings import NAMED_CHECK, STAGE, Rule, found
from oomwatch.records import Evidence, Finding

SAYS: Final = (
    "A worker stopped answering in time: it hangs or died without a word; memory is not the cause."
)
_RING: Final = re.compile(
    r"shm_broadcast\.py:|multiproc_executor\.py:(?:collective_rpc|get_response)"
)
_PY_SPY: Final = (
    "What the silent worker does: `py-spy dump --pid PID`; the kernel log for Xid lines."
)
_MANY: Final = 3
"""Health checks of 20 s that a busy server does not miss in a row."""


def ring_evidence(facts: Facts) -> list[Evidence]:
    """The line in which vLLM waits for its workers, if there is one."""
    event = facts.said("vllm.shm_wait")
    return [cite(event.line)] if event else []


def waits_for_transfer(facts: Facts) -> bool:
    """Whether what the engine waited for was KV blocks of another server."""
    return (
        facts.said("vllm.kv_blocks_expired") is not None
        and facts.failing("kv.transfer") is not None
    )


def ring_timeout(facts: Facts) -> Finding | None:
    """A worker did not take or answer a message in time; the exception has no words."""
    for failure in facts.failures:
        frames = "\n".join(failure.frames)
        if failure.name.endswith("TimeoutError") and _RING.search(frames):
            return found(
                facts,
                "rpc_timeout_hang",
                0.8,
                SAYS,
                [*cite_failure(failure), *ring_evidence(facts)],
                strength=STAGE,
                order=failure.order,
                values={"frame": telling_frame(failure.frames)},
                unseen=(_PY_SPY,),
            )
    return None


def hang(facts: Facts) -> Finding | None:
    """Workers stopped taking messages and nothing followed."""
    event = facts.run.find_last("vllm.shm_wait") if facts.run else None
    run = facts.run
    if event is None or run is None or run.last is None or facts.failures:
        return None
    if (not facts.served and not facts.ready) or event.order < run.last_alive:
        return None
    return found(
        facts,
        "rpc_timeout_hang",
        0.65,
        SAYS,
        [cite(event.line)],
        strength=STAGE,
        order=event.order,
        values={"stage": "serving"},
        unseen=(_PY_SPY,),
    )


def missed_checks(facts: Facts) -> Finding | None:
    """SGLang's health checks fail; a long prefill does that too, and is over when one succeeds."""
    run = facts.run
    checks = [f for f in facts.failures if f.match("sglang.health") is not None]
    if run is None or not checks or facts.failing("sglang.watchdog") is not None:
        return None  # the watchdog's word is the surer one
    ends = [m.order for m in facts.messengers if m.order > checks[-1].order]
    dead = min(ends, default=None)
    signs = sorted([*(order for order, _ in run.alive), *run.probed])
    if any(order > checks[-1].order and (dead is None or order < dead) for order in signs):
        return None
    last_sign = max((order for order in signs if order < checks[-1].order), default=-1)
    missed = [f for f in checks if f.order > last_sign]
    survived = len(checks) - len(missed)
    return found(
        facts,
        "rpc_timeout_hang",
        _sureness(len(missed), survived, died=dead is not None),
        SAYS if not survived or dead is not None else _slow(missed, survived),
        [*cite_failure(missed[0]), *(cite_failure(missed[-1])[:1] if len(missed) > 1 else ())],
        strength=NAMED_CHECK if dead is not None or len(missed) >= _MANY else STAGE,
        order=missed[0].order,
        values={"stage": "serving"},
        unseen=(
            _PY_SPY,
            *(
                ()
                if dead is not None
                else ("What came after the last health check: the server may have answered again.",)
            ),
        ),
    )


def _sureness(missed: int, survived: int, *, died: bool) -> float:
    if died or (missed >= _MANY and not survived):
        return 0.82
    if missed >= _MANY:
        return 0.7
    return 0.5 if survived else 0.6


def _slow(missed: list[Failure], survived: int) -> str:
    many = f"{len(missed)} health checks were" if len(missed) > 1 else "A health check was"
    return (
        f"{many} not answered in time; the server had come back from {survived} before. It hangs now, or is too busy to"
        " answer (a long prefill does that); memory is not the cause."
    )


RULES: Final[tuple[Rule, ...]] = (ring_timeout, hang, missed_checks)
"""Every rule of this file."""
