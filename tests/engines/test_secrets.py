"""What is a secret in a command, in the environment and in what a server prints of itself."""

from __future__ import annotations

import shlex
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.engines.secrets import (
    HIDDEN,
    fill_in,
    hide_text,
    hide_values,
    hide_words,
    is_secret,
    shell_line,
)

S = "s3cr3t/+Q=="


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"api_key='{S}', model='m'", "api_key='***', model='m'"),
        (f"{{'api_key': ['{S}', '{S}2'], 'port': 8000}}", "{'api_key': ['***'], 'port': 8000}"),
        (f'Namespace(api_key=["{S}"], port=1)', 'Namespace(api_key=["***"], port=1)'),
        (f"ServerArgs(api_key='{S}', admin_api_key='{S}')", None),
        (f"api_key=SecretStr('{S}')", None),
        (f"hf_token='{S}", "hf_token='***"),  # cut off
        (f'{{"api_key":"{S}","n":1}}', '{"api_key":"***","n":1}'),
        (rf"{{\"api_key\": \"{S}\", \"n\": 1}}", r"{\"api_key\": \"***\", \"n\": 1}"),
        (
            f"vllm serve m --api-key {S} {S}2 '{S} 3' --port 8",
            "vllm serve m --api-key *** --port 8",
        ),
        (f"--api_key={S} --port 8", "--api_key=*** --port 8"),
        (f"['--api-key', '{S}', '{S}2', '--port', '8']", "['--api-key', '***', '--port', '8']"),
        (f"--ssl-keyfile-password {S} --port 8", "--ssl-keyfile-password *** --port 8"),
        (f"--hf-token {S} --port 8", "--hf-token *** --port 8"),
        (f"--token {S}", "--token ***"),
        (f"docker run -e HF_TOKEN={S} -e A=1 vllm", "docker run -e HF_TOKEN=*** -e A=1 vllm"),
        (f"VLLM_API_KEY={S} vllm serve m", "VLLM_API_KEY=*** vllm serve m"),
        (f"AWS_SECRET_ACCESS_KEY={S}", "AWS_SECRET_ACCESS_KEY=***"),
        (f"NGC_CLI_KEY={S} X_AUTH={S}", "NGC_CLI_KEY=*** X_AUTH=***"),
        (f"Authorization: Bearer {S}", "Authorization: Bearer ***"),
        (f"{{'authorization': 'Bearer {S}'}}", None),
        (f"(b'authorization', b'Bearer {S}')", None),
        (f"password: {S}", "password: ***"),
        ("redis://user:s3cr3t@h:1/0", "redis://user:***@h:1/0"),
        ("redis://:s3cr3t@x@h", "redis://:***@h"),
        ("https://s3cr3t@h/repo", "https://***@h/repo"),
        ("http://h/m?api_key=s3cr3t&n=1", "http://h/m?api_key=***&n=1"),
        ("got hf_" + "s3cr3tABCd" * 4 + " back", "got *** back"),
    ],
)
def test_hidden_in_text(text, shown):
    found = hide_text(text)
    assert "s3cr3t" not in found
    assert HIDDEN in found
    assert shown in (None, found)
    assert hide_text(found) == found, "a second look changes nothing"


B64 = "s3cr3tABCd" * 4
HEX = "5ec2e7ab" * 5


@pytest.mark.parametrize(
    "key",
    [
        f"hf_{B64}", f"api_org_{B64}", f"sk-proj-{B64}", f"sk-ant-api03-{B64}", f"nvapi-{B64}",
        "ms-5ec2e7ab-5ec2-e7ab-5ec2-5ec2e7ab5ec2", f"{HEX[:32]}.{B64[:16]}", f"gsk_{B64}", f"xai-{B64}",
        f"pplx-{B64}", f"r8_{B64}", f"fw_{B64[:24]}", f"ghp_{B64}", f"glpat-{B64}", f"npm_{B64}",
        f"pypi-AgEIcHlwaS5vcmc{B64}", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", f"AIzaSyA{B64[:32]}",
        f"ya29.a0Af{B64}", f"dapi{HEX[:32]}", f"LTAI5t{B64[:18]}", f"AKID{B64[:32]}", f"AKLT{B64}",
        f"dop_v1_{HEX}", f"xoxb-1234567890-{B64}", f"xoxe.xoxp-1-{B64}", f"xapp-1-A012-123456-{B64}",
        f"123456789:AAH{B64[:32]}", f"sk_live_{B64[:24]}", f"rk_live_{B64[:24]}", f"shpat_{HEX[:32]}",
        f"SG.{B64[:22]}.{B64}", f"whsec_{B64}", "NRAK-S3CR3TABCDS3CR3TABCDS3CR3TA", f"ATATT3x{B64}",
        f"lin_api_{B64}", f"ntn_{B64}", f"hvs.{B64}", f"dp.pt.{B64}",
        "AGE-SECRET-KEY-1" + "QZ3" * 19,
        f"-----BEGIN PRIVATE KEY----- {B64} {B64}",
        f"-----BEGIN RSA PRIVATE KEY-----\\nDEK-Info: AES-256-CBC\\n{B64}\\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_the_shape_of_a_key_is_enough(key):
    assert hide_text(f"cannot use {key}") == "cannot use ***"
    assert hide_text(f'{{"k": "{key}"}}').startswith('{"k": "***')


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"X-Auth-Key: {HEX}", "X-Auth-Key: ***"),
        ("pwd=hunter2 n=1", "pwd=*** n=1"),
        ("DB_PWD=hunter2", "DB_PWD=***"),
        (f"wandb login {HEX}", "wandb login ***"),
        (f"-----BEGIN PRIVATE KEY-----{B64}-----END PRIVATE KEY----- then", "*** then"),
    ],
)
def test_other_names_of_secrets(text, shown):
    assert hide_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "api_key=None, hf_token=True, password=''",
        "Namespace(bos_token='<s>', eos_token_id=2, mask_token='<mask>')",
        "KV cache: 131072 bytes_per_token=128, tokens: 71,424, BYTES_PER_TOKEN=4",
        "--max-num-batched-tokens 2048 --tokenizer /m --api-key-file /run/k --api-key $KEY",
        "vllm serve: error: argument --api-key: expected at least one argument",
        "KeyError: 'model.layers.0.key_cache', monkey=1",
        "GET http://127.0.0.1:8000/metrics?user@host",
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "PWD=/root AUTHOR=me pwd=/srv OLDPWD=/root cwd=x",
        f"models--Qwen--Qwen3/snapshots/{'0c' * 20}/model-00001-of-00017.safetensors",
        f"sha256:{'0c' * 32} ~/.cache/vllm/torch_compile_cache/{'0c' * 5}/rank_0_0/{'0c' * 16}.cubin",
        "pplx-7b-online fw_attention_kernel_with_a_long_name r8_kernel npm_config dp.size SG.x",
        "INFO 12345678:AAB3 GPU-5ec2e7ab-5ec2-e7ab-5ec2-5ec2e7ab5ec2 ms-marco-MiniLM-L-12-v2",
    ],
)
def test_left_as_it_is(text):
    assert hide_text(text) == text


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("vllm serve m --api-key a b c --port 8", "vllm serve m --api-key *** --port 8"),
        ("vllm serve m --api-k a --port 8", "vllm serve m --api-k *** --port 8"),
        ("vllm serve m --api-key=a", "vllm serve m --api-key=***"),
        ("vllm serve --hf-token a m", "vllm serve --hf-token *** m"),
        ("vllm serve m --api-key $KEY", "vllm serve m --api-key $KEY"),
        (
            "python -m sglang.launch_server --model-path m --admin-api-key a --tp 2",
            "python -m sglang.launch_server --model-path m --admin-api-key *** --tp 2",
        ),
        (
            "docker run -e HF_TOKEN='a b' --env=X_KEY=c img/vllm-openai --model m --api-key d",
            "docker run -e HF_TOKEN=*** --env=X_KEY=*** img/vllm-openai --model m --api-key ***",
        ),
        ("serve.py --wandb-api-key a b --password c d", None),
        ('vllm serve m --model-loader-extra-config \'{"api_key": "a"}\'', None),
    ],
)
def test_hidden_in_words(line, shown):
    words = shlex.split(line)
    found = hide_words(words)
    if shown is not None:
        assert list(found) == shlex.split(shown)
    else:
        assert HIDDEN in " ".join(found)
    assert hide_words(found) == found


def test_the_script_of_a_shell_is_read_as_text():
    found = hide_words(["bash", "-c", "HF_TOKEN=a1b2 exec vllm serve m --api-key c3d4 --port 8"])
    assert found[2] == "HF_TOKEN=*** exec vllm serve m --api-key *** --port 8"


def test_values_by_name():
    given = {
        "--api-key": ["a", "b"],
        "--port": 8000,
        "--otlp": "http://u:p@h",
        "HF_TOKEN": "a",
        "--hf-token": True,
        "nested": {"password": "a", "n": 1},
    }
    assert hide_values(given) == {
        "--api-key": HIDDEN,
        "--port": 8000,
        "--otlp": "http://u:***@h",
        "HF_TOKEN": HIDDEN,
        "--hf-token": True,
        "nested": {"password": HIDDEN, "n": 1},
    }


@pytest.mark.parametrize("name", ["--api-key", "VLLM_API_KEY", "hf_token", "Proxy-Authorization"])
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["--tokenizer", "--max-model-len", "tokens", "eos_token", "key"])
def test_names_of_none(name):
    assert not is_secret(name)


def test_a_shell_takes_the_variables():
    words = hide_words(
        [
            "env",
            "HF_TOKEN=x",
            "vllm",
            "serve",
            "it's $HOME",
            "--api-key",
            "a",
            "b",
            "--x",
            "u://p:q@h",
        ]
    )
    line = shell_line(words, "vllm")
    env = {"HF_TOKEN": "one $1", "VLLM_API_KEY": 'two "2"', "PASSWORD": "three", "PATH": "/bin"}
    script = f"printf '%s\\n' {line}"
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "env", "HF_TOKEN=one $1", "vllm", "serve", "it's $HOME", "--api-key", 'two "2"', "--x",
        "u://p:three@h",
    ]  # fmt: skip


def test_other_forms_of_a_variable():
    words = ["--admin-api-key", HIDDEN, "--api-key=***", "A_KEY=***", "a***b"]
    assert fill_in(words, "sglang", "$({})") == [
        "--admin-api-key",
        "$(SGLANG_ADMIN_API_KEY)",
        "--api-key=$(SGLANG_API_KEY)",
        "A_KEY=$(A_KEY)",
        "a***b",
    ]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters=" \t\n\r\x0b\x0c")))
def test_any_value_of_a_flag_is_hidden(secret):
    value = f"zq{secret}"
    assert "zq" not in " ".join(hide_words(["vllm", "serve", "m", "--api-key", value]))
    assert "zq" not in hide_text(f"--hf-token {shlex.quote(value)} --port 8").replace("'", "")
    assert "zq" not in hide_text(f"{{'api_key': {value!r}}}")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_words_are_taken(words):
    assert len(hide_words(words)) <= len(words)
    hide_text(" ".join(words))
    shell_line(words, None)


def test_hostile_text_takes_no_time():
    for text in (
        "--api-key k " * 9000,
        "api_key=" + "]" * 90_000 + "x",
        "://" * 30_000 + "@",
        "-----BEGIN PRIVATE KEY-----" * 4_000,
        "0c" * 60_000,
        "dp.pt." * 20_000,
        "eyJ" * 30_000,
    ):
        begun = time.process_time()
        hide_text(text)
        assert time.process_time() - begun < 5, "linear: some hundredths of a second"
