"""vLLM servers that die, hang and are restarted while a run trains on them; see
`tests/support/faulty_runs.py`.

Servers start nine times in all, a minute or two each: `make test-vllm` runs these tests, `.ci/run`
does not.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gspo.rollout.vllm.vllm_api import PATH
from megatron_gspo.servers.server_processes import LocalServers
from tests.support import faulty_runs
from tests.support.fault_proxy import VLLM_CHANGES
from tests.support.faulty_runs import Begin, FaultyServers, Watch
from tests.support.training_runs import tiny_model
from tests.vllm.conftest import StartServers

pytestmark = pytest.mark.slow
MODULE = "vllm.entrypoints.openai.api_server"
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} (\S+)", re.MULTILINE)
# a first response takes vLLM some seconds, and on a busy machine many
QUICK = {
    "health_interval": 0.5,
    "health_timeout": 20.0,
    "request_timeout": 120.0,
    "weight_transport": "distributed",
}


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> FaultyServers:
    model = tiny_model(tmp_path_factory.mktemp("faulty") / "model")
    return FaultyServers(
        "vllm",
        model,
        MODULE,
        QUICK,
        PATH,
        VLLM_CHANGES,
        "/collective_rpc",
        "/weight_info",
        decoding,
    )


@pytest.fixture(scope="module")
def servers(start_servers: StartServers, kind: FaultyServers) -> Iterator[LocalServers]:
    servers = start_servers(count=2, model=kind.model)
    yield servers
    servers.stop()


@pytest.fixture
def begin(kind: FaultyServers, tmp_path: Path) -> Iterator[Begin]:
    with faulty_runs.runs_in(tmp_path, kind) as begin:
        yield begin


def decoding(url: str, log: Path) -> Watch:
    """See `FaultyServers`, by the server's own count of its running requests."""

    def is_decoding() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                running = RUNNING.search(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return False
        return running is not None and float(running[1]) >= faulty_runs.MIN_DECODING

    return is_decoding


def test_a_server_of_the_run_is_killed_and_another_time_hangs(begin, vllm_python):
    own = {"num_servers": 1, "python": vllm_python}
    faulty_runs.kill_and_stop_own_server(begin(steps=4, servers=own, processes=faulty_runs.CLIENTS))


def test_servers_fail_in_every_way_are_killed_and_restart_with_old_weights(begin, kind, servers):
    faulty_runs.fail_in_every_way(begin, kind, servers)


def test_without_servers_the_run_ends_with_a_checkpoint_and_resumes_from_it(begin, kind, servers):
    faulty_runs.end_without_servers_and_resume(begin, kind, servers)
