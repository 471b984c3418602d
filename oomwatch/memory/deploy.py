"""A planned command as a service: a Compose file, or a Kubernetes Deployment with its Service.

Text only; nothing is applied. Scalars are written as JSON strings, which YAML reads as they are.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from oomwatch.engines.secrets import HIDDEN

_PORT: Final = {"vllm": 8000, "sglang": 30000}
_IMAGE: Final = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}
_SHARED_MEMORY: Final = "16Gi"


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """What both forms need: the words of the server and where it runs."""

    engine: str
    version: str | None
    program: Sequence[str]
    """The program's own words, such as ``vllm serve``."""
    arguments: Sequence[str]
    env: Mapping[str, str]
    """A value of `HIDDEN` is a secret: Compose takes it from its own variables, a pod from the
    Secret of the service's name."""
    gpus: int

    @property
    def image(self) -> str:
        """The engine's released image, with the version's tag where it is known."""
        return f"{_IMAGE[self.engine]}:{'v' + self.version if self.version else 'latest'}"

    @property
    def port(self) -> int:
        """The port in the arguments, else the engine's default."""
        words = list(self.arguments)
        for place, word in enumerate(words):
            name, _, value = word.partition("=")
            if name == "--port":
                text = value or (words[place + 1] if place + 1 < len(words) else "")
                if text.isdigit():
                    return int(text)
        return _PORT[self.engine]

    @property
    def name(self) -> str:
        """A name that DNS takes, from the model."""
        model = next((w for w in self.arguments if not w.startswith("-")), self.engine)
        short = re.sub(r"[^a-z0-9]+", "-", model.rsplit("/", 1)[-1].lower()).strip("-")
        return (short or self.engine)[:50].strip("-")


def compose(service: Service) -> str:
    """A whole Compose service: image, command, GPUs, port, health check, cache volume."""
    lines = [
        "services:",
        f"  {service.name}:",
        f"    image: {_text(service.image)}",
        f"    entrypoint: {_list(service.program)}",
        "    command:",
        *(f"      - {_text(word)}" for word in service.arguments),
        *_compose_env(service),
        "    ports:",
        f"      - {_text(f'{service.port}:{service.port}')}",
        "    ipc: host",
        "    volumes:",
        '      - "hf-cache:/root/.cache/huggingface"',
        "    restart: on-failure",
        "    healthcheck:",
        f"      test: {_list(['CMD', 'curl', '-fsS', f'http://localhost:{service.port}/health'])}",
        "      interval: 15s",
        "      timeout: 5s",
        "      retries: 4",
        "      start_period: 20m",
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        "            - driver: nvidia",
        f"              count: {service.gpus}",
        "              capabilities: [gpu]",
        "volumes:",
        "  hf-cache: {}",
    ]
    return "\n".join(lines) + "\n"


def _compose_env(service: Service) -> list[str]:
    if not service.env:
        return []
    return [
        "    environment:",
        *(
            f"      {key}: {_text(f'${{{key}}}' if value == HIDDEN else value)}"
            for key, value in sorted(service.env.items())
        ),
    ]


def kubernetes(service: Service) -> str:
    """A Deployment and a Service: GPUs, probes that allow a slow start, shared memory."""
    variables = [
        line
        for key, value in sorted(service.env.items())
        for line in (f"            - name: {key}", f"              {_value(service, key, value)}")
    ]
    probe = [
        "            httpGet:",
        "              path: /health",
        f"              port: {service.port}",
    ]
    lines = [
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        f"  name: {service.name}",
        f"  labels: {{app: {service.name}}}",
        "spec:",
        "  replicas: 1",
        "  strategy: {type: Recreate}",
        f"  selector: {{matchLabels: {{app: {service.name}}}}}",
        "  template:",
        "    metadata:",
        f"      labels: {{app: {service.name}}}",
        "    spec:",
        "      containers:",
        f"        - name: {service.engine}",
        f"          image: {_text(service.image)}",
        f"          command: {_list(service.program)}",
        "          args:",
        *(f"            - {_text(word)}" for word in service.arguments),
        *(["          env:", *variables] if variables else []),
        "          ports:",
        f"            - containerPort: {service.port}",
        "          resources:",
        "            limits:",
        f"              nvidia.com/gpu: {service.gpus}",
        "          startupProbe:",
        *probe,
        "            periodSeconds: 10",
        "            failureThreshold: 120",
        "          readinessProbe:",
        *probe,
        "            periodSeconds: 10",
        "          livenessProbe:",
        *probe,
        "            periodSeconds: 15",
        "            failureThreshold: 4",
        "          volumeMounts:",
        "            - {name: shm, mountPath: /dev/shm}",
        "            - {name: hf-cache, mountPath: /root/.cache/huggingface}",
        "      volumes:",
        f"        - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {_SHARED_MEMORY}}}}}",
        "        - {name: hf-cache, emptyDir: {}}",
        "---",
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        f"  name: {service.name}",
        "spec:",
        f"  selector: {{app: {service.name}}}",
        "  ports:",
        f"    - {{port: {service.port}, targetPort: {service.port}}}",
    ]
    return "\n".join(lines) + "\n"


def _value(service: Service, key: str, value: str) -> str:
    if value == HIDDEN:
        return f"valueFrom: {{secretKeyRef: {{name: {service.name}, key: {key}}}}}"
    return f"value: {_text(value)}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)


def _list(words: Sequence[str]) -> str:
    return "[" + ", ".join(_text(word) for word in words) + "]"
