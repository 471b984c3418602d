import pytest

from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import find_device
from oomwatch.memory.planner import PlanInput


@pytest.fixture
def given():
    """Builds the input of a plan: model and card by name, flags as keyword arguments."""

    def build(
        model="llama-3.1-8b",
        gpu="h100-80gb",
        *,
        version="0.11.0",
        engine="vllm",
        flags=None,
        **more,
    ):
        return PlanInput(
            model=model if not isinstance(model, str) else load_model(None, model).model,
            device=find_device(gpu),
            engine=engine,
            version=version,
            arguments=dict(flags or {}),
            **more,
        )

    return build
