import yaml

from oomwatch.memory.deploy import Service, compose, kubernetes

SERVICE = Service(
    engine="vllm",
    version="0.19.0",
    program=["vllm", "serve"],
    arguments=[
        "Qwen/Qwen3-32B",
        "--port",
        "9000",
        "--speculative-config",
        '{"method": "mtp"}',
        "--x=it's: #1",
    ],
    env={"VLLM_USE_FLASHINFER_SAMPLER": "1"},
    gpus=4,
)


def test_compose_is_a_whole_service():
    service = yaml.safe_load(compose(SERVICE))["services"]["qwen3-32b"]
    assert service["image"] == "vllm/vllm-openai:v0.19.0"
    assert service["entrypoint"] + service["command"] == ["vllm", "serve", *SERVICE.arguments]
    assert service["ports"] == ["9000:9000"]
    assert "http://localhost:9000/health" in service["healthcheck"]["test"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4
    assert service["environment"] == {"VLLM_USE_FLASHINFER_SAMPLER": "1"}


def test_kubernetes_has_probes_gpus_and_shared_memory():
    deployment, service = yaml.safe_load_all(kubernetes(SERVICE))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] + container["args"] == ["vllm", "serve", *SERVICE.arguments]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["startupProbe"]["httpGet"]["port"] == 9000
    assert container["env"] == [{"name": "VLLM_USE_FLASHINFER_SAMPLER", "value": "1"}]
    assert any(v.get("emptyDir", {}).get("medium") == "Memory" for v in pod["volumes"])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_names_and_ports_without_hints():
    bare = Service(
        "sglang", None, ["python", "-m", "sglang.launch_server"], ["--tp-size", "2"], {}, 2
    )
    assert bare.port == 30000
    assert bare.image.endswith(":latest")
    assert yaml.safe_load(compose(bare))["services"]
