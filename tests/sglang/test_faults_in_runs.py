"""SGLang servers that die, hang and are restarted while a run trains on them; see
`tests/support/faulty_runs.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sglang.test_servers import MODULE
from tests.support import faulty_runs
from tests.support.fault_proxy import CHANGES
from tests.support.faulty_runs import SECONDS, Begin, FaultyServers, TrainingRun, Watch

DECODES = re.compile(rb"Decode batch.*#running-req: (\d+)")
QUICK = {
    "health_interval": 0.5,
    "health_timeout": 4.0,
    "request_timeout": 60.0,
    "weight_transport": "tensor",
}


@pytest.fixture(scope="module")
def kind(sglang_model: str) -> FaultyServers:
    return FaultyServers(
        "sglang",
        sglang_model,
        MODULE,
        QUICK,
        "/generate",
        CHANGES,
        "/update_weights_from_tensor",
        "/model_info",
        decoding,
    )


@pytest.fixture(scope="module", autouse=True)
def own_server(
    kind: FaultyServers, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future]:
    """`kill_and_stop_own_server` runs beside the other tests, because it mostly waits for a
    server to start.
    """
    servers = {
        "num_servers": 1,
        "python": sglang_python,
        "server_args": ["--decode-log-interval", "1"],
    }
    run = TrainingRun(
        kind,
        tmp_path_factory.mktemp("own") / "run",
        steps=4,
        servers=servers,
        processes=faulty_runs.CLIENTS,
    )
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(faulty_runs.kill_and_stop_own_server, run)
        run.kill()


@pytest.fixture
def begin(kind: FaultyServers, tmp_path: Path) -> Iterator[Begin]:
    with faulty_runs.runs_in(tmp_path, kind) as begin:
        yield begin


def decoding(url: str, log: Path) -> Watch:
    """See `FaultyServers`, by the server's log: it has a line for each decoded batch."""
    size = log.stat().st_size if log.exists() else 0

    def is_decoding() -> bool:
        with open(log, "rb") as file:
            file.seek(size)
            return any(
                int(count) >= faulty_runs.MIN_DECODING for count in DECODES.findall(file.read())
            )

    return is_decoding


def test_servers_fail_in_every_way_are_killed_and_restart_with_old_weights(
    begin, kind, sglang_servers
):
    faulty_runs.fail_in_every_way(begin, kind, sglang_servers)


@pytest.mark.slow  # tests/train/test_saves.py has it without servers
def test_without_servers_the_run_ends_with_a_checkpoint_and_resumes_from_it(
    begin, kind, sglang_servers
):
    faulty_runs.end_without_servers_and_resume(begin, kind, sglang_servers)


def test_a_server_of_the_run_is_killed_and_another_time_hangs(own_server):
    own_server.result(3 * SECONDS)
