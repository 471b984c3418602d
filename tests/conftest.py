from __future__ import annotations

import os
import signal

import pytest
from fakenvml.library import FakeNvml, compiler


def pytest_configure() -> None:
    """Let nothing depend on how the tests were started.

    A shell has what runs in the background ignore Ctrl-C, and what that starts inherits it. The
    width of a terminal is passed on as a variable.
    """
    os.environ.pop("COLUMNS", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    """A host whose NVIDIA driver is a script; see tests/fakenvml/README.md."""
    if compiler() is None:
        pytest.skip("no C compiler to build the scripted NVML library with")
    return FakeNvml(tmp_path_factory.mktemp("fakenvml"))
