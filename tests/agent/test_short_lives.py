"""A server that fails within seconds of its start, between two searches of the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SERVER = """
import sys, time
print("(APIServer pid=41) INFO 11-29 20:50:00 [api_server.py:1] vLLM API server version 0.11.0")
sys.stdout.flush()
time.sleep(2.5)
print("ValueError: No available memory for the cache blocks. Try increasing "
      "`gpu_memory_utilization` when initializing the engine.")
sys.exit(1)
"""


def test_a_start_that_fails_within_seconds_is_seen(new_agent, tmp_path):
    agent = new_agent(discovery__enabled="true", discovery__interval="1h").start()
    program, log, port = tmp_path / "vllm", tmp_path / "server.log", 20000 + os.getpid() % 20000
    program.write_text(SERVER)
    words = [sys.executable, str(program), "serve", "/models/m", "--port", str(port)]
    with log.open("wb") as output:
        assert subprocess.run(words, stdout=output, check=False).returncode == 1
    agent.wait_for(lambda: agent.incidents(f"vllm-{port}"), "its failure is told")


def test_a_store_may_be_named_as_a_shell_does(tmp_path):
    words = [sys.executable, "-m", "oomwatch", "agent", "--store", "./here.db"]
    words += ["--set", "discovery.enabled=false"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as agent:
        try:
            deadline = time.monotonic() + 30
            while not (tmp_path / "here.db").exists():
                assert agent.poll() is None, "it ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            agent.send_signal(signal.SIGKILL)
