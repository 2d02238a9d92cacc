"""Real vLLM servers for tests: `make test-vllm` passes the interpreter that has it; without,
they're skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_gspo.config import VLLMConfig
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import python_of, save_character_model, skip_without_python

HERE = Path(__file__).parent
StartServers = Callable[..., LocalServers]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_python(config, items, HERE, "vllm")


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has vllm."""
    return python_of(request.config, "vllm")


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random float32 Qwen3-MoE: 4 layers, 8 experts, 2 active, and a character
    tokenizer. vLLM's attention on a CPU needs heads of 32 dimensions or more; it pads the experts.
    """
    return save_character_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32)


@pytest.fixture(scope="session")
def start_servers(
    vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServers]:
    """`start_servers(count=2, model=DIR)` gives `LocalServers` that serve it in float32; all are
    stopped at the end of the session."""
    started: list[LocalServers] = []

    def start(*, count: int, model: str, server_args: Sequence[str] = ()) -> LocalServers:
        config = VLLMConfig(num_servers=count, python=vllm_python, server_args=list(server_args))
        servers = LocalServers(
            VLLMLaunch(config, model, "float32", log_dir=str(tmp_path_factory.mktemp("logs")))
        )
        started.append(servers)
        servers.start()
        return servers

    yield start
    for servers in started:
        servers.stop()


@pytest.fixture(scope="session")
def vllm_server(start_servers: StartServers, vllm_model: str) -> LocalServers:
    """One server that the whole session shares: a test leaves it running, unpaused, and with
    any weights.
    """
    return start_servers(count=1, model=vllm_model)
