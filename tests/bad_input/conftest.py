"""One tiny model for the whole catalogue."""

from __future__ import annotations

import resource

import pytest

from tests.train.run import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("bad_input_model"))


@pytest.fixture(scope="session", autouse=True)
def many_files() -> None:
    """Room for the descriptors that torch keeps of every process group of this process, destroyed ones too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
