import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from oomwatch.errors import SourceUnavailable, UsageError
from oomwatch.memory.config_source import checkpoint_bytes, load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(folder, config=CONFIG, name="config.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder


def tensors(folder, entries, name="model.safetensors"):
    header = json.dumps(
        {k: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for k, (d, s) in entries.items()}
    ).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header)


def test_a_file_a_folder_and_a_local_name(tmp_path):
    folder = write(tmp_path / "m")
    for found in (
        load_model(str(folder / "config.json"), None),
        load_model(str(folder), None),
        load_model(None, str(folder)),
    ):
        assert found.model.hidden == 64
        assert found.where.endswith("config.json")


def test_the_users_cache_is_read_without_a_network(tmp_path):
    root = tmp_path / "hf" / "hub" / "models--acme--tiny"
    write(root / "snapshots" / "old", {**CONFIG, "hidden_size": 32})
    write(root / "snapshots" / "abc")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    assert load_model(None, "acme/tiny").model.hidden == 64


@pytest.mark.parametrize(
    ("name", "layers", "method"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32, None),
        ("meta-llama/Llama-3.3-70B-Instruct", 80, None),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32, None),
        ("Qwen/Qwen3-32B-FP8", 64, "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", 80, "awq"),
        ("deepseek-ai/DeepSeek-R1", 61, "fp8"),
        ("google/gemma-3-12b-it", 48, None),
    ],
)
def test_popular_names_need_no_files(name, layers, method):
    found = load_model(None, name)
    assert len(found.model.layers) == layers
    assert (found.model.quantization or {}).get("quant_method") == method
    assert "built-in table" in found.note


def test_an_unknown_name_says_what_to_do():
    with pytest.raises(UsageError, match="--model-config"):
        load_model(None, "acme/unheard-of")
    with pytest.raises(UsageError, match="no model"):
        load_model(None, None)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"', "{}"])
def test_files_that_are_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError):
        load_model(str(tmp_path / "config.json"), None)


def test_missing_and_unreadable_paths(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError):
            load_model(str(path), None)


def test_modelopt_keeps_its_quantization_in_a_file_of_its_own(tmp_path):
    folder = write(tmp_path / "m")
    write(folder, {"quantization": {"quant_algo": "FP8"}}, "hf_quant_config.json")
    assert load_model(str(folder), None).model.quantization["quant_method"] == "modelopt"


def test_weight_files_are_weighed_by_their_headers(tmp_path):
    folder = write(tmp_path / "m")
    tensors(
        folder,
        {"model.layers.0.w": ("BF16", [10, 20]), "model.layers.1.q": ("F8_E4M3", [7])},
        "a.safetensors",
    )
    tensors(
        folder,
        {"model.layers.2.draft": ("BF16", [1000]), "mtp.fc": ("BF16", [1000]), "s": ("F32", [3])},
        "b.safetensors",
    )
    assert checkpoint_bytes(folder, 2) == 400 + 7 + 12
    assert load_model(str(folder), None).checkpoint_bytes == 419
    assert load_model(str(write(tmp_path / "n")), None).checkpoint_bytes is None


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, struct.pack("<Q", 5) + b"hello"])
def test_damaged_weight_files_are_no_fact(tmp_path, damage):
    (tmp_path / "x.safetensors").write_bytes(damage)
    assert checkpoint_bytes(tmp_path, 2) is None


class Hub(BaseHTTPRequestHandler):
    seen = []  # noqa: RUF012 - the server makes the handlers, so they share the class

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("Authorization")))
        gated = "gated" in self.path
        body = b"" if gated else json.dumps(CONFIG).encode()
        self.send_response(403 if gated else 200 if "tiny" in self.path else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_only_when_told_and_with_the_users_token(hub, monkeypatch):
    hub.seen.clear()
    with pytest.raises(UsageError):
        load_model(None, "acme/tiny")
    assert hub.seen == []
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert load_model(None, "acme/tiny", hub=True).model.hidden == 64
    assert hub.seen == [("/acme/tiny/resolve/main/config.json", "Bearer secret-token")]


@pytest.mark.usefixtures("hub")
def test_gated_missing_and_offline(monkeypatch):
    with pytest.raises(SourceUnavailable, match="HF_TOKEN"):
        load_model(None, "acme/gated", hub=True)
    with pytest.raises(SourceUnavailable, match="404"):
        load_model(None, "acme/none", hub=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceUnavailable, match="HF_HUB_OFFLINE"):
        load_model(None, "acme/tiny", hub=True)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        load_model(None, "acme/tiny", hub=True)
