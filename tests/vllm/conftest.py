"""Real vLLM servers for tests: `make test-vllm` passes the interpreter that has it; without, they're skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_gspo.config import VLLMConfig
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import python_of, save_character_model, skip_without_python

HERE = Path(__file__).parent
StartServer = Callable[..., LocalServers]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_python(config, items, HERE, "vllm")


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has vllm."""
    return python_of(request.config, "vllm")


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random float32 Qwen3-MoE: 4 layers, 8 experts, 2 active, and a character tokenizer. vLLM's
    attention on a CPU needs heads of 32 dimensions or more; it pads the experts."""
    return save_character_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32)


@pytest.fixture(scope="session")
def start_server(
    vllm_python: str, vllm_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """`start_server(*arguments)` gives `LocalServers` with one that serves `vllm_model` in float32; it is stopped at
    the end of the session."""
    started: list[LocalServers] = []

    def start(*arguments: str) -> LocalServers:
        config = VLLMConfig(num_servers=1, python=vllm_python, server_args=arguments)
        servers = LocalServers(VLLMLaunch(config, vllm_model, "float32", log_dir=str(tmp_path_factory.mktemp("logs"))))
        started.append(servers)
        servers.start()
        return servers

    yield start
    for servers in started:
        servers.stop()


@pytest.fixture(scope="session")
def vllm_server(start_server: StartServer) -> LocalServers:
    """One server that the whole session shares: a test leaves it running, unpaused, and with any weights."""
    return start_server()
