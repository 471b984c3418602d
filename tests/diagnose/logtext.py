"""Logs as text for the tests of this folder, and what the reader makes of them."""

from __future__ import annotations

import datetime
import io

from oomwatch.diagnose.inputs import Inputs, LogInput
from oomwatch.records import LogLine
from oomwatch.sources.logfile import read_stream
from oomwatch.sources.logformat_time import Clock

WRITTEN_AT = 1_763_640_000.0  # 2025-11-20, so that times without a year get one
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "1.02 GiB is free. Including non-PyTorch memory, this process has 78.05 GiB memory in use. Of the "
    "allocated memory 75.10 GiB is allocated by PyTorch, and 1.11 GiB is reserved by PyTorch but unallocated."
)
START = """\
(APIServer pid=1) INFO 11-20 09:14:02 [api_server.py:1839] vLLM API server version 0.11.0
(EngineCore_DP0 pid=171) INFO 11-20 09:14:18 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/m', max_seq_len=32768
(EngineCore_DP0 pid=171) INFO 11-20 09:14:25 [gpu_model_runner.py:2602] Starting to load model /models/m...
(EngineCore_DP0 pid=171) INFO 11-20 09:14:41 [gpu_model_runner.py:2653] Model loading took 14.2488 GiB and 9.3 seconds
(EngineCore_DP0 pid=171) INFO 11-20 09:15:10 [gpu_worker.py:298] Available KV cache memory: 54.81 GiB
"""
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
SERVED = (
    '(APIServer pid=1) INFO:     10.2.0.7:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
)


def lines_of(text: str, name: str = "server.log") -> list[LogLine]:
    """The lines of a log, as the product reads them."""
    stream = io.BufferedReader(io.BytesIO(text.encode()))
    return list(read_stream(stream, name, clock=Clock(datetime.UTC, WRITTEN_AT)))


def inputs_of(*texts: str) -> Inputs:
    """Inputs of one diagnosis: a log each, named by place."""
    logs = tuple(
        LogInput(f"{index}.log", lines_of(text, f"{index}.log")) for index, text in enumerate(texts)
    )
    return Inputs(generated_at=WRITTEN_AT, logs=logs)


def raised(
    exception: str, *frames: str, at: str = "09:30:11", who: str = "EngineCore_DP0 pid=171"
) -> str:
    """A traceback as vLLM logs it; frames are ``file.py:function``."""
    prefix = f"({who}) ERROR 11-20 {at} [core.py:710] "
    lines = ["EngineCore encountered a fatal error.", "Traceback (most recent call last):"]
    for frame in frames:
        file, _, function = frame.partition(":")
        lines += [f'  File "/opt/vllm/{file}", line 10, in {function}', "    return run(x)"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, exception])
