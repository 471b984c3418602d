from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logtext import OOM, lines_of, raised

from oomwatch.diagnose.client_text import is_client_text, own_words, without_echo
from oomwatch.diagnose.events import Failure, LogEvent, extract
from oomwatch.records import LogLine


def failures(text: str) -> list[Failure]:
    return [item for item in extract(lines_of(text)) if isinstance(item, Failure)]


def events(text: str) -> list[LogEvent]:
    return [item for item in extract(lines_of(text)) if isinstance(item, LogEvent)]


def test_a_prefixed_traceback_becomes_one_failure() -> None:
    (found,) = failures(
        raised(f"torch.OutOfMemoryError: {OOM}", "core.py:step", "qwen2.py:forward")
    )
    assert found.name == "torch.OutOfMemoryError"
    assert found.frames == ("core.py:step", "qwen2.py:forward")
    assert found.oom is not None
    assert found.oom.tried_bytes == 2 << 30
    assert found.announced
    assert found.line.number == 7


def test_bare_lines_go_on_with_the_record_before_them() -> None:
    (found,) = failures(
        "[2025-09-03 14:05:02 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/managers/scheduler.py", line 5, in event_loop_overlap\n'
        "    self.run()\n"
        "IndexError: list index out of range\n"
    )
    assert (found.name, found.frames) == ("IndexError", ("scheduler.py:event_loop_overlap",))
    assert found.header.startswith("Scheduler hit an exception")


def test_tracebacks_of_two_processes_do_not_mix() -> None:
    first = raised("ValueError: one", "a.py:f", who="Worker_TP0 pid=7").splitlines(keepends=True)
    second = raised("KeyError: 'two'", "b.py:g", who="Worker_TP1 pid=8").splitlines(keepends=True)
    mixed = "".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert {(f.name, f.frames) for f in failures(mixed)} == {
        ("ValueError", ("a.py:f",)),
        ("KeyError", ("b.py:g",)),
    }


def test_a_cut_traceback_keeps_its_frames_and_last_line_of_code() -> None:
    text = raised("KeyError: 1", "core.py:step", "qwen2.py:forward").rsplit("(EngineCore", 1)[0]
    (found,) = failures(text)
    assert (found.name, found.frames[-1], found.code) == ("", "qwen2.py:forward", "return run(x)")


def test_a_message_ends_where_the_next_record_begins() -> None:
    text = raised("ValueError: first\nsecond", "a.py:f").replace("\nsecond", "")
    (found,) = failures(
        text + "(APIServer pid=1) INFO 11-20 09:31:00 [loggers.py:127] Engine 000: on\n"
    )
    assert found.message == "first"


@pytest.mark.parametrize(
    "line",
    [
        f"INFO 11-20 09:20:00 [logger.py:41] Received request c-1: prompt: 'RuntimeError: {OOM}'",
        f"INFO 08-12 08:10:00 async_llm_engine.py:379] Received request c-1: prompt: '{OOM}'",
        f"[2025-09-03 14:05:00] Receive: obj=GenerateReqInput(text='{OOM}')",
        f"[2025-09-03 14:05:00] Finish: obj=GenerateReqInput(text='{OOM}'), out={{}}",
        f'{{"object":"error","message":"{OOM}","code":400}}',
        f"2025-05-13 11:31:04,120 - lmdeploy - INFO - prompt='{OOM}', gen_config=None",
        f'2024-06-03T07:05:02.1Z ERROR generate{{inputs: "{OOM}"}}: text_generation_router: nothing',
    ],
)
def test_what_a_client_sent_is_no_event(line: str) -> None:
    assert list(extract(lines_of(line + "\n"))) == []


_LONG = "Input prompt (9000 tokens) is too long and exceeds the capacity of block_manager"
_CLIENTS_WORDS = [
    "ERROR 11-20 09:20:00 [serving_chat.py:200] Error with model object='error' message='The model `{}` does not exist.' code=404",
    "ERROR 11-20 09:20:00 [serving_chat.py:200] Error with model error=ErrorInfo(message='The model `{}` does not exist.', code=404)",
    "WARNING 11-20 09:20:00 [protocol.py:83] The following fields were present in the request but ignored: {{'{}'}}",
    "WARNING 11-20 09:20:00 api.py:83] The following fields were present in the request but ignored: {{'{}'}}",
    "INFO 11-20 09:20:00 [async_llm.py:400] Aborted request cmpl-{}.",
    "INFO 11-20 09:20:00 [async_llm.py:300] Added request chatcmpl-{}.",
    "ERROR 11-20 09:20:00 [hermes_tool_parser.py:100] Error in extracting tool call from response: {}",
    "WARNING 11-20 09:20:00 [chat_utils.py:100] Unknown content '{}'",
    "[2025-11-20 09:20:00] [http_server] Error: Got LoRA adapter that has never been loaded: {}",
    "[2025-11-20 09:20:00] Abort queued request. req.rid='{}'",
    '[2025-11-20 09:20:00] Abort queued request. req.rid="it\'s {}"',
    "[2025-11-20 09:20:00] Error in detect_and_parse: {}",
    "[2025-11-20 09:20:00] Tool parsing error: {}",
    "[2025-11-20 09:20:00] Failed to parse JSON part: {}, JSON parse error: x",
]


@pytest.mark.parametrize("words", [OOM, _LONG, "[Errno 98] Address already in use"])
@pytest.mark.parametrize("line", _CLIENTS_WORDS)
def test_names_and_ids_that_a_client_chose_are_no_event(line: str, words: str) -> None:
    items = list(extract(lines_of(line.format(words) + "\n")))
    assert [item for item in items if isinstance(item, Failure) and item.matches] == []
    assert [item for item in items if isinstance(item, LogEvent)] == []


def test_what_the_engine_says_behind_the_id_of_a_request_counts() -> None:
    line = (
        "[2025-11-20 09:20:00] Prefill transfer failed for request rank=0 req.rid='{}' "
        "with exception KVTransferError(bootstrap_room=1): Decode instance could be dead"
    )
    assert "sglang.transfer" in {e.pattern.id for e in events(line.format(OOM) + "\n")}
    assert "cuda.oom_raw" not in {e.pattern.id for e in events(line.format(OOM) + "\n")}


@pytest.mark.parametrize(
    ("path", "name", "counts"),
    [
        ("vllm/entrypoints/chat_utils.py", "ValueError", False),
        ("vllm/entrypoints/openai/tool_parsers/hermes_tool_parser.py", "KeyError", False),
        ("vllm/entrypoints/chat_utils.py", "torch.OutOfMemoryError", True),
        ("vllm/v1/core/kv_cache_utils.py", "ValueError", True),
        ("vllm/entrypoints/openai/serving_engine.py", "ValueError", True),
    ],
)
def test_a_refused_request_quotes_the_client(path: str, name: str, *, counts: bool) -> None:
    text = (
        "Traceback (most recent call last):\n"
        f'  File "/usr/lib/python3/site-packages/{path}", line 8, in parse\n    raise\n'
        f"{name}: {OOM}\n"
    )
    (found,) = failures(text)
    assert bool(found.matches) is counts
    assert (found.oom is not None) is counts


def test_the_router_is_heard_after_the_span_of_a_request() -> None:
    line = (
        '2024-06-03T07:05:02.114Z ERROR chat_completions{inputs="x}: y: z.rs:1: CUDA out of memory"}:stream:'
        " text_generation_router::infer: router/src/infer.rs:123: `inputs` must have less than 64 tokens. Given: 70\n"
    )
    assert own_words(line.strip()) is not None
    assert {e.pattern.id for e in events(line)} == {"tgi.too_long"}


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        (
            "pydantic_core.ValidationError",
            "bad [type=x, input_value={'a': 'CUDA out'}, input_type=dict]",
            "bad",
        ),
        ("fastapi.exceptions.RequestValidationError", "[{'input': 'CUDA out of memory'}]", ""),
        ("ValueError", "CUDA out", "CUDA out"),
    ],
)
def test_echoes_of_requests_are_taken_out_of_messages(name: str, text: str, kept: str) -> None:
    assert without_echo(name, text).startswith(kept)
    assert ("CUDA out" in without_echo(name, text)) == (name == "ValueError")


def test_a_refused_configuration_keeps_its_reason() -> None:
    reason = "1 validation error for ModelConfig\n  Value error, no such dtype [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]"
    assert "Value error, no such dtype" in without_echo("pydantic_core.ValidationError", reason)


@pytest.mark.parametrize(
    ("before", "announced"),
    [
        ("ERROR:    Exception in ASGI application\n", True),
        ("Process EngineCore_0:\n", True),
        ("Exception in thread Thread-3:\n", True),
        ("explain this to me\n", False),
        ("(EngineCore pid=9) crashed with\n", False),
    ],
)
def test_a_traceback_is_announced_by_programs_only(before: str, announced: bool) -> None:
    text = (
        "INFO:     Started server process [1]\n"
        f'{before}Traceback (most recent call last):\n  File "/a/m.py", line 1, in f\n    f()\nValueError: x\n'
    )
    (found,) = failures(text)
    assert found.announced is announced


def test_items_carry_the_time_of_the_last_line_that_has_one() -> None:
    text = (
        "[2025-09-03 14:05:02] Load weight begin. avail mem=78.61 GB\n"
        'Traceback (most recent call last):\n  File "/a/m.py", line 1, in f\nValueError: x\n'
        "[2025-09-03 15:00:00] Load weight begin. avail mem=78.61 GB\n"
    )
    begin, failure, again = extract(lines_of(text))
    assert failure.seen_at == begin.seen_at
    assert again.seen_at == pytest.approx(begin.seen_at + 3298)


_TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=60
) | st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "/a/b.py", line 1, in f',
        "ValueError: x",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
        "",
        "    code()",
        "During handling of the above exception, another exception occurred:",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_TEXT, st.sampled_from([None, "EngineCore", "APIServer"])), max_size=30))
def test_any_lines_give_items_that_stand_in_them(rows: list[tuple[str, str | None]]) -> None:
    lines = [
        LogLine("f", number, text, process=who, prefixed=who is not None)
        for number, (text, who) in enumerate(rows, 1)
    ]
    for item in extract(lines):
        assert item.line in lines
        assert 1 <= item.order <= len(lines)
        if isinstance(item, Failure):
            assert len(item.frames) == len(item.paths) or not item.paths
            assert not is_client_text(item.line)


def test_words_of_an_exception_without_a_traceback_go_on_over_bare_lines() -> None:
    (found,) = failures(
        "ValueError: To serve at least one request with the model's max seq len (4096),\n"
        "2.5 GiB KV cache is needed, which is larger than the available KV cache memory (1.75 GiB).\n"
        "Based on the available memory, the estimated maximum model length is 2864.\n"
    )
    fields = found.match("vllm.max_len_v1")
    assert fields is not None
    assert fields["estimated_tokens"] == 2864
    assert fields["available_bytes"] == 7 << 28


@pytest.mark.parametrize(
    "after",
    [
        "Killed",
        "Application startup complete.",
        "worker exited with exit code 137",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_what_says_something_of_its_own_is_no_part_of_an_exception_before_it(after: str) -> None:
    first = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 640.00 MiB."
    both = list(extract(lines_of(f"{first}\n{after}\n")))
    (alone,) = [item for item in both if isinstance(item, Failure) and item.oom is not None]
    assert alone.details == ()
    assert [type(item) for item in both if item is not alone] == [
        type(item) for item in extract(lines_of(f"{after}\n"))
    ]
