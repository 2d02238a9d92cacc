"""Real SGLang servers for tests: `make test-sglang` passes the interpreter that has it;
without, they're skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_gspo.config import SGLangConfig
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import python_of, save_character_model, skip_without_python

HERE = Path(__file__).parent
StartServers = Callable[..., LocalServers]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_python(config, items, HERE, "sglang")


@pytest.fixture(scope="session")
def sglang_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has sglang."""
    return python_of(request.config, "sglang")


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random float32 Qwen3-MoE: 4 layers, 8 experts, 2 active, and a character
    tokenizer.
    """
    return save_character_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def start_servers(
    sglang_python: str, sglang_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServers]:
    """`start_servers(count=2, **settings)` gives `LocalServers` that are up; all are stopped at the
    end of the session.

    settings: of the config. They serve `model`, default `sglang_model`, in float32 and return
    routed experts.
    """
    started: list[LocalServers] = []

    def start(*, count: int, model: str = sglang_model, **settings: object) -> LocalServers:
        config = SGLangConfig(
            num_servers=count, python=sglang_python, start_timeout=300.0, **settings
        )
        servers = LocalServers(
            SGLangLaunch(config, model, "float32", True, str(tmp_path_factory.mktemp("logs")))
        )
        started.append(servers)
        servers.start()
        return servers

    yield start
    for servers in started:
        servers.stop()


@pytest.fixture(scope="session")
def sglang_server(start_servers: StartServers) -> LocalServers:
    """One server that the whole session shares: a test leaves it running, unpaused, and with
    any weights.
    """
    return start_servers(count=1)


@pytest.fixture(scope="session")
def sglang_url(sglang_server: LocalServers) -> str:
    """The URL of `sglang_server`."""
    return sglang_server.urls[0]
