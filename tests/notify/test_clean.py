from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.notify.clean import clean_text

PIECES = (
    "<!channel>", "<!here|here>", "<@U012AB>", "<#C1|general>", "@here", "@all", "＠所有人",
    "@everyone", '<at user_id="all">', "</at>", "<", "!", "@", ">", "|", "channel", "here",
    "http://evil.example/x", "<http://evil.example|click>", "javascript:alert(1)", "www.evil.example",
    "\u202e", "\u200b", "\x1b[31m", "\x00", " hf_" + "A1" * 20, " sk-" + "b" * 30, " ", "a", " <@h>f_" + "A1" * 20,
)  # fmt: skip
CALLS = re.compile(
    r"<[!@#][^<>]{1,90}>|[@＠](?:here|channel|everyone|all|所有人)(?!\w)|<at\b|https?://|javascript:|"
    r"www\.evil|hf_A1A1|sk-bbb",
    re.IGNORECASE | re.ASCII,
)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain text, 1 < 2 and 3 > 2", "plain text, 1 < 2 and 3 > 2"),
        ("oops <!channel> and <@U1|bob>", "oops channel and bob"),
        ("<<!channel>!channel>", "<channel!channel>"),
        ("mail @here, not me@home", "mail here, not me@home"),
        ("see https://pytorch.org/docs?a=b for", "see [link] for"),
        ("a <http://evil.example|fix> b", "a <[link]|fix> b"),
        ("see evil.com/login, evil.com?x", "see [link] [link]"),
        ("see пример.com or еvil.рф/x", "see [link] or [link]"),
        ("see www。evil。com, https：//evil.com", "see [link] [link]"),
        ("see http:/evil.com https:evil.com //evil.com/x", "see [link] [link] [link]"),
        ("see mailto:a@b.co ftp.evil.com", "see [link] [link]"),
        ("on @аll, @ｃｈａｎｎｅｌ, @hеre, ﹫all", "on аll, ｃｈａｎｎｅｌ, hеre, all"),
        ('<mention-tag target="here"/>a <users/all>', "a"),
        ("[fix](dingtalk://x/y) it", "[fix]([link]) it"),
        ("\u202ehf_\u200b" + "A" * 34, "***"),
        ("<!channel>hf_" + "A" * 34, "channel***"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer ***"),
        ("line\x1b[2J\nnext\ttab", "line next tab"),
        ("Received request cmpl-1: prompt: 'hi'", "Received request …"),
        ('refused {"messages": [{"role": "user"}]}', 'refused {"messages": …'),
        ("KV cache: 5 prompts, 3 messages", "KV cache: 5 prompts, 3 messages"),
        ("got text='my recipe'", "got text=…"),
        ('completion="my recipe"', "completion=…"),
        ("out generated_text=['my recipe']", "out generated_text=…"),
        ('output_text: "my recipe"', "output_text: …"),
        ('instructions: "my recipe"', "instructions: …"),
        ("prompt = my recipe", "prompt = …"),
        ("turn user: my recipe", "turn user: …"),
        ("### Human: my recipe", "### Human: …"),
        ("user: 我的菜谱", "user: …"),
        ("in <|im_start|>user my recipe", "in <|im_start|>…"),
        ("in <｜User｜>my recipe", None),
        ("in [INST] my recipe [/INST]", "in [INST]…"),
        (
            "ValueError: Conversation roles must alternate: my recipe",
            "ValueError: Conversation roles must alternate: …",
        ),
    ],
)
def test_what_is_left(text, cleaned):
    assert "recipe" not in clean_text(text, 300)
    assert cleaned in {None, clean_text(text, 300)}


@pytest.mark.parametrize(
    "text",
    [
        "Avg prompt throughput: 512.0 tokens/s, prompt: 512 tokens, n_prompt_tokens = 12",
        "user: root",
        "gpu-07.example.com:8000, Qwen/Qwen3-32B, vllm/v1/core.py:708, server.log:1, 0.11.0",
        "docker.io/vllm/vllm-openai:v0.11.0, ghcr.io/a/b, /kubepods.slice/cri-ab.scope/x.com",
        "org.apache/x torch.nn.Module config.json/2 GPU-1.2/3 显存不足。请降低",
        "context: 8192, text: 5, completion tokens: 7, input: 4096",
        "prompt eval time = 12 ms; new prompt, n_ctx_slot = 4096",
    ],
)
def test_what_a_server_says_of_itself_is_left(text):
    assert clean_text(text, 300) == text


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_mixture_calls_links_or_tells_keys(text):
    cleaned = clean_text(text, 200)
    assert not CALLS.search(cleaned)
    assert cleaned.isprintable()


@given(st.text(max_size=400), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_any_text_fits(text, limit):
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    assert cleaned.isprintable()


def test_a_key_is_not_shown_by_half_where_a_line_is_cut():
    key = "hf_" + "Q" * 34
    for padding in range(7_960, 8_010):
        text = "é\u200b" + "x" * 50 + " " + "***" * (padding // 3) + " " * (padding % 3) + key
        assert "hf_" not in clean_text(text, 2_000)


def test_a_megabyte_takes_no_time_worth_a_word():
    assert clean_text("<" * 1_000_000, 100).startswith("<<<")
    assert clean_text("@" * 1_000_000 + "here", 100).startswith("@@@")
    assert len(clean_text("<!" * 500_000 + ">" * 500_000, 100)) <= 100


def test_nesting_is_not_followed_for_ever():
    assert clean_text("<!" * 50 + "channel" + ">" * 50, 300) == "!" * 42 + "channel"
    assert not CALLS.search(clean_text("<!" * 2_000 + "channel" + ">" * 2_000, 300))
