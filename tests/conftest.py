from __future__ import annotations

import pytest
from fakenvml.library import FakeNvml, compiler


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    """A host whose NVIDIA driver is a script; see tests/fakenvml/README.md."""
    if compiler() is None:
        pytest.skip("no C compiler to build the scripted NVML library with")
    return FakeNvml(tmp_path_factory.mktemp("fakenvml"))
