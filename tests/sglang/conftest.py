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
from tests.support.training_runs import WORD

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
    """Directory of a random float32 Qwen3-MoE: 2 layers, 8 experts, 2 active, and a character
    tokenizer.
    """
    folder = tmp_path_factory.mktemp("sglang") / "model"
    return save_character_model(folder, words=[WORD], num_hidden_layers=2)


@pytest.fixture(scope="session")
def start_servers(
    sglang_python: str, sglang_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServers]:
    """`start_servers(count=2, **settings)` gives `LocalServers` that are up; all are stopped at the
    end of the session.

    settings: of the config. They serve `sglang_model` in float32 and return routed experts.
    """
    started: list[LocalServers] = []

    def start(*, count: int, **settings: object) -> LocalServers:
        config = SGLangConfig(
            num_servers=count, python=sglang_python, start_timeout=300.0, **settings
        )
        servers = LocalServers(
            SGLangLaunch(
                config, sglang_model, "float32", True, str(tmp_path_factory.mktemp("logs"))
            )
        )
        started.append(servers)
        servers.start()
        return servers

    yield start
    for servers in started:
        servers.stop()


@pytest.fixture(scope="session")
def sglang_servers(start_servers: StartServers) -> LocalServers:
    """Two servers that the whole session shares, since each start takes half a minute of a core:
    a test leaves them running, unpaused, and with any weights. They log each decoded batch.
    """
    return start_servers(count=2, server_args=("--decode-log-interval", "1"))


@pytest.fixture(scope="session")
def sglang_url(sglang_servers: LocalServers) -> str:
    """The URL of the first of `sglang_servers`."""
    return sglang_servers.urls[0]
