"""What engines put in front of their log lines, as data: pattern, versions, a sample.

Two kinds. `PROCESS_PREFIXES` name the process or rank that wrote a line and may be stacked:
``(EngineCore_DP0 pid=171) (Worker_TP1 pid=180) …``. `RECORD_PREFIXES` begin a log record (level,
time, origin) and stand at most once, after the process prefixes; a record that was found hides
whatever follows, so that text which quotes a log line is never taken for one. Only the kinds named
in `then` may follow: uvicorn's own level after SGLang's bracket.

Named groups: ``level``, ``process``, ``pid``, ``rank``, ``origin`` and the time as one of ``iso``
(date and time, any separator), ``yearless`` (``MM-DD HH:MM:SS`` of vLLM) or ``glog``
(``MMDD HH:MM:SS.ffffff``, of PyTorch also ``MDD``). Patterns are anchored, have no nested quantifiers, and so take time
linear in the length of the prefix.

Versions are the releases that were read or run (None: open end).
"""

from __future__ import annotations

import dataclasses
import re
import string
from typing import Final

LEVELS: Final = {
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
    "ERR": "ERROR",
    "CRIT": "CRITICAL",
    "NOTICE": "INFO",
    "EVENT": "INFO",
    "D": "DEBUG",
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
}
"""Spellings of levels other than Python's own; the names of Python's logging are the norm."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """One way in which an engine begins a line."""

    id: str
    engine: str
    pattern: re.Pattern[str]
    sample: str
    since: str | None = None
    until: str | None = None
    starts: str = ""
    """Characters a line with this prefix can start with; empty: any."""
    then: tuple[str, ...] = ()


_P = re.compile
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"

PROCESS_PREFIXES: Final = (
    Prefix(
        "vllm_worker_rank",
        "vllm",
        _P(
            r"\((?P<process>VllmWorker) (?:rank=)?(?P<rank>(?:[A-Z]{2,3})?\d{1,5}(?:[ _][A-Z]{2,3}\d{1,5}){0,4}) pid=(?P<pid>\d{1,10})\) ?"
        ),
        "(VllmWorker rank=1 pid=120) INFO 04-01 04:28:26 [utils.py:1055] Found nccl",
        since="0.8.0",
        until="0.10.2",  # "rank=1" up to 0.9.2, then "TP1"
        starts="(",
    ),
    Prefix(
        "named_process",
        "vllm",  # vLLM's decorated streams, and Ray's actors: one shape
        _P(
            r"\((?P<process>[A-Za-z_][\w.:<>-]{0,80}(?:\([\w.:<>()-]{1,80}\))?) pid=(?P<pid>\d{1,10})(?:, [^()\n]{0,400})?\) ?"
        ),
        "(EngineCore_DP0 pid=171) Traceback (most recent call last):",
        since="0.5.0",
        starts="(",
    ),
    Prefix(
        "ray_pid",
        "ray",
        _P(r"\(pid=(?P<pid>\d{1,10})(?:, [^()\n]{0,400})?\) ?"),
        "(pid=811, ip=192.0.2.10) INFO 05-09 00:49:33 utils.py:981] Found nccl",
        starts="(",
    ),
    Prefix(
        "process_number",
        "vllm",  # supervisors that print multiprocessing's own process names
        _P(r"\((?P<process>(?:Spawn)?Process-\d{1,10})\) ?"),
        "(Process-215) INFO 06-14 21:48:23 [model.py:568] Resolved architecture",
        starts="(",
    ),
    Prefix(
        "torch_rank",
        "pytorch",
        _P(r"\[(?:[A-Za-z_]{1,20}[0-9]{0,4}:)?rank ?(?P<rank>\d{1,5})\]: ?"),
        "[rank0]: Traceback (most recent call last):",
        starts="[",
    ),
)

RECORD_PREFIXES: Final = (
    Prefix(
        "vllm_bracket",
        "vllm",
        _P(
            _LEVEL
            + r" (?P<yearless>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d{1,6})? \[(?P<origin>[^\]\n:]{1,120}:\d{1,6})\] ?"
        ),
        "INFO 11-29 12:00:00 [gpu_worker.py:298] Available KV cache memory: 54.81 GiB",
        since="0.8.0",
        starts="DIWEC",
    ),
    Prefix(
        "vllm_old",
        "vllm",
        _P(
            _LEVEL
            + r" (?P<yearless>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d{1,6})? (?P<origin>[\w./-]{1,120}:\d{1,6})\] ?"
        ),
        "INFO 05-09 00:49:33 scheduler.py:1057] text",
        until="0.7.3",
        starts="DIWEC",
    ),
    Prefix(
        "sglang_bracket",
        "sglang",
        _P(
            r"\[(?P<iso>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
            r"(?P<rank>(?: [A-Z_]{1,12}\d{1,5}){0,6})(?: gpu_id=\d{1,3})?\] ?"
        ),
        "[2025-09-01 21:31:30 DP0 TP3] Decode batch, #running-req: 12, token usage: 0.93",
        since="0.2.0",
        then=("uvicorn", "plain_level", "nccl"),  # since 2.26 NCCL writes the time like SGLang
        starts="[",
    ),
    Prefix(
        "sglang_gpu_id",
        "sglang",
        _P(r"\[gpu(?:_id)?=(?P<rank>\d{1,3})\] ?"),
        "[gpu_id=0] Load weight begin. avail mem=78.50 GB",
        until="0.2.15",
        starts="[",
    ),
    Prefix(
        "sglang_diffusion",
        "sglang",
        _P(r"\[(?P<yearless>\d\d-\d\d \d\d:\d\d:\d\d)\] ?"),
        "[12-16 14:27:08] Rank 0 scheduler is dead. Please check if there are relevant logs.",
        since="0.5.5",
        starts="[",
    ),
    Prefix(
        "uvicorn",
        "uvicorn",
        _P(
            r"(?P<level>TRACE(?=: {4})|DEBUG(?=: {4})|INFO(?=: {5})|WARNING(?=: {2})|ERROR(?=: {4})|CRITICAL(?=: )):"
            r" {1,5}"
        ),
        'INFO:     192.0.2.7:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        starts="TDIWEC",
    ),
    Prefix(
        "tgi",
        "tgi",
        _P(
            r"(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{1,9}Z) {1,3}(?P<level>TRACE|DEBUG|INFO|WARN|ERROR) "
            # vLLM's own level and time behind the stamp of a container's log
            r"(?!\d\d-\d\d \d\d:\d\d:\d\d )(?:(?P<origin>\w{1,60}(?:::\w{1,60}){0,8}): )?"
        ),
        "2025-03-12T06:09:16.000000Z  INFO text_generation_launcher: Args {",
        starts="12",
    ),
    Prefix(
        "lmdeploy",
        "lmdeploy",
        _P(
            r"(?P<iso>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?) - lmdeploy - "
            + _LEVEL
            + r" - (?:(?P<origin>[\w./-]{1,120}:\d{1,6}) - )?"
        ),
        "2025-05-13 11:30:03,120 - lmdeploy - ERROR - async_engine.py:123 - text",
        starts="12",
    ),
    Prefix(
        "turbomind",
        "lmdeploy",
        _P(r"\[TM\]\[(?P<level>DEBUG|INFO|WARNING|ERROR|FATAL)\] ?"),
        "[TM][WARNING] [LlamaTritonModel] `max_context_token_num` is not set",
        starts="[",
    ),
    Prefix(
        "ollama",
        "ollama",
        _P(
            r"time=(?P<iso>\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d)) level=(?P<level>DEBUG|INFO|WARN|ERROR|TRACE) "
            r"(?:source=(?P<origin>[\w./-]{1,120}:\d{1,6}) )?"
        ),
        'time=2025-06-01T10:00:00.123+02:00 level=WARN source=server.go:171 msg="requested context size too large"',
        starts="t",
    ),
    Prefix(
        "ascend",
        "ascend",
        _P(
            r"\[(?P<level>DEBUG|INFO|WARNING|ERROR|EVENT)\] (?P<process>\w{1,40})\((?P<pid>\d{1,10}),[^()\n]{1,60}\):"
            r"(?P<iso>\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d)[\d.]{0,12} \[(?P<origin>[\w./-]{1,120}:\d{1,6})\]"
        ),
        "[ERROR] RUNTIME(1234,python3):2025-05-30-10:01:02.123.456 [npu_driver.cc:1280]1290 MallocDevice: out of memory",
        starts="[",
    ),
    Prefix(
        "torch_cpp",
        "pytorch",
        _P(
            # months below 10 have one digit
            r"\[(?P<level>[IWEF])(?P<glog>\d{3,4} \d\d:\d\d:\d\d(?:\.\d{1,9})?) (?P<origin>[\w./+-]{1,200}:\d{1,6})\] ?"
        ),
        "[W1129 13:12:08.532104933 utils.cpp:68] Warning: NUMA binding",
        starts="[",
    ),
    Prefix(
        "torch_glog",
        "pytorch",
        _P(
            r"(?P<level>[IWEF])(?P<glog>\d{4} \d\d:\d\d:\d\d\.\d{1,9}) {1,7}(?P<pid>\d{1,10}) (?P<origin>[^\s:\]]{1,300}:\d{1,6})\] ?"
        ),
        "W1129 13:11:48.782000 3490 torch/_library/triton.py:53] Triton not available",
        starts="IWEF",
    ),
    Prefix(
        "nccl",
        "pytorch",  # NCCL prints host:pid:thread [device] file:line by itself
        _P(
            r"[\w.-]{1,80}:(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?:(?P<origin>[\w./-]{1,120}:\d{1,6}) )?"
            r"(?=NCCL (?P<level>WARN|INFO|ERROR))"
        ),
        "node-1:4121:4420 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-AbCd12",
    ),
    Prefix(
        "llama_cpp",
        "llama.cpp",  # a function name stands first and belongs to the text
        _P(
            r"(?=(?:srv|slot|main|que|init|load|common|system_info|build|ggml_\w{1,80}|llama_\w{1,80}|llm_load_\w{1,40}|print_info|sched_\w{1,40}|~?llama_\w{1,40})"
            r"(?: {1,12}\w{1,60})?:)"
        ),
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory",
        starts=string.ascii_lowercase + "~",
    ),
    Prefix(
        "python_logging",
        "pytorch",
        _P(
            r"(?P<iso>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?:- )?(?:(?P<origin>[\w.]{1,80}) - )?"
            + _LEVEL
            + r"(?: - | ?: ?| )"
        ),
        "2025-05-13 11:30:03,120 - train - ERROR - CUDA out of memory",
        starts="12",
    ),
    Prefix(
        "loguru",
        "pytorch",
        _P(
            r"(?P<iso>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \| (?P<level>TRACE|DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL) {0,8}\| "
            r"(?:(?P<origin>[\w.<>]{1,120}:[\w<>]{1,80}:\d{1,6}) - )?"
        ),
        "2025-05-13 11:30:03.120 | ERROR    | app.server:run:88 - CUDA out of memory",
        starts="12",
    ),
    Prefix(
        "plain_level",
        "pytorch",  # Python's logging.basicConfig, also SGLang with a level in its own format
        _P(_LEVEL + r":(?P<origin>[A-Za-z_][\w.]{0,80}):"),
        "ERROR:vllm.engine.async_llm_engine:Engine background task failed",
        starts="DIWEC",
    ),
    Prefix(
        "vllm_logging_prefix",
        "vllm",  # VLLM_LOGGING_PREFIX puts any text in front; quotes and braces speak of something else
        _P(
            r"[^'\"{}()=\n]{1,64}?"
            + _LEVEL
            + r" (?P<yearless>\d\d-\d\d \d\d:\d\d:\d\d) \[(?P<origin>[^\]\n:]{1,120}:\d{1,6})\] ?"
        ),
        "[replica-3] INFO 11-29 12:00:00 [core.py:133] Initializing a V1 LLM engine",
        since="0.9.0",
    ),
)

RANK_IN_PROCESS: Final = re.compile(
    r"_((?:(?:DP|PP|TP|EP|CP|PCP|DCP)\d{1,4}_?)+)$|Worker-(\d{1,4})$"
)
"""Where a vLLM process name carries its ranks: ``Worker_PP0_TP1``, ``VllmWorker-0``."""
