"""How sure a hang is, by what came before and after the health checks that were missed."""

from __future__ import annotations

import pytest
from logtext import inputs_of

from oomwatch.diagnose.judge import diagnose

START = """\
[2025-05-20 08:00:00] server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.87)
[2025-05-20 08:01:01] The server is fired up and ready to roll!
[2025-05-20 08:01:09] INFO:     10.0.0.8:51000 - "POST /generate HTTP/1.1" 200 OK
"""
MISSED = "[2025-05-20 08:02:20] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.\n"
PROBED = '[2025-05-20 08:02:41] INFO:     10.0.0.1:41000 - "GET /health_generate HTTP/1.1" 200 OK\n'
WATCHDOG = "[2025-05-20 08:07:20] Watchdog timeout (self.watchdog_timeout=300)\n"


def sure(text: str) -> float | None:
    incidents = diagnose(inputs_of(START + text)).incidents
    if not incidents:
        return None
    assert incidents[0].finding.cause == "rpc_timeout_hang"
    return incidents[0].finding.confidence


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        (MISSED, 0.55, 0.65),
        (MISSED * 3, 0.8, 0.9),
        (MISSED + PROBED + MISSED, 0.4, 0.55),
        (MISSED + PROBED + MISSED * 3, 0.65, 0.75),
        (MISSED + WATCHDOG, 0.8, 0.9),
    ],
)
def test_a_hang_is_as_sure_as_what_shows_it(text: str, least: float, most: float) -> None:
    found = sure(text)
    assert found is not None
    assert least <= found <= most


@pytest.mark.parametrize("text", [MISSED + PROBED, MISSED * 4 + PROBED])
def test_a_server_that_answers_again_does_not_hang(text: str) -> None:
    assert sure(text) is None
