"""Several ranks send their own tensors to the same servers, which implement SGLang's protocol."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import DiskError
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.weight_sync import WHOLE, WeightSync, _FailedError, senders_of
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.receiver.megatron_gspo_receiver import (
    checksum as receiver_checksum,
)
from megatron_gspo.weight_transport.weight_source import Relay, WeightSource, numbered
from megatron_gspo.weight_transport.weight_update import make_transport
from tests.support.distributed import run_distributed
from tests.support.sglang_generator import MODEL
from tests.support.weight_server import checksum, weight_servers

SOURCES = numbered([WeightSource(rank) for rank in (0, 1, 3)])  # of 4 ranks
COUNT = 6  # tensors of each


def tensor(source: int, number: int, version: int) -> torch.Tensor:
    return torch.full((250,), float(version * 1000 + source * 100 + number))


class Rank:
    """What a rank of a run has for weight updates; the engine on rank 0."""

    def __init__(
        self,
        urls: list[str],
        transport: str,
        folder: str = "",
        sources: Any = SOURCES,
        **given: Any,
    ) -> None:
        """given: with `num_servers=1` the servers have our receiver."""
        config = ServerConfig(
            urls=tuple(urls),
            weight_transport=transport,
            weight_dir=folder or None,  # type: ignore[arg-type]
            weight_bucket_mb=0.004,
            update_timeout=60,
            health_interval=60.0,
            **given,
        )
        self.rank = dist.get_rank()
        self.version = 0
        self.lines: list[str] = []
        sends = self.rank == 0 or any(self.rank in senders_of(source) for source in sources)
        transport = make_transport(config, SGLangAPI()) if sends else None
        self.client = None
        if self.rank == 0:
            self.client = RolloutClient(
                urls, config, MODEL, str, api=SGLangAPI(), log=self.lines.append
            )
        self.sync = WeightSync(config, self.client, transport, sources, log=self.lines.append)
        self.at: Any = lambda number: None
        self.streams = 0

    def weights(self, source: WeightSource | None = None, /) -> Iterator[tuple[str, torch.Tensor]]:
        """None: the tensors of all sources, on every rank."""
        is_source = source is None or source.rank == self.rank
        self.streams += is_source
        for each in SOURCES if source is None else (source,):
            for number in range(COUNT):
                if is_source:
                    self.at(number)
                    yield f"{each.rank}.{number}", tensor(each.rank, number, self.version)

    def update(self, version: int) -> Exception | None:
        self.version = version
        failure = self.sync.run(self.weights, version)
        dist.all_reduce(torch.ones(1))  # the ranks can communicate
        return failure

    def close(self) -> None:
        self.sync.close()
        if self.client is not None:
            self.client.close()


def held(rank: Rank, url: str) -> dict[str, Any]:
    assert rank.client is not None
    client = ServerClient(url, rank.client.session)
    return rank.client.loop.run(client.get("/held", timeout=60))


def truth(version: int, ranks: tuple[int, ...] = (0, 1, 3)) -> dict[str, int]:
    return {
        f"{rank}.{n}": checksum(tensor(rank, n, version)) for rank in ranks for n in range(COUNT)
    }


def two_updates(
    number: int, world: int, servers: list[tuple[str, int]], sources: Any, receiver: int
) -> Any:
    urls = [url for url, _ in servers]
    rank = Rank(urls, "distributed", "", sources, num_servers=receiver)
    assert rank.update(1) is None and rank.update(2) is None
    on_servers = [held(rank, url) for url in urls] if number == 0 else []
    serving = len(rank.client.pool.serving) if rank.client else 0
    rank.close()
    return on_servers, serving, rank.streams


@pytest.mark.parametrize(
    ("sources", "receiver"),
    [(SOURCES, 0), (WHOLE, 0), (SOURCES, 1)],
    ids=["one after the other", "rank 0 alone", "at the same time"],
)
def test_every_source_sends_its_own_tensors_once_to_all_servers(
    sources: Any, receiver: int
) -> None:
    with weight_servers(2) as servers:
        by_rank = run_distributed(two_updates, 4, servers, sources, receiver)
    for server in by_rank[0][0]:
        assert server["held"] == truth(2)
        assert server["buckets"] == 2 * len(SOURCES) * COUNT
    assert by_rank[0][1] == 2
    assert [streams for _, _, streams in by_rank] == (
        [2, 2, 0, 2] if sources == SOURCES else [2, 2, 2, 2]
    )


def a_server_dies(number: int, world: int, servers: list[tuple[str, int]], receiver: int) -> Any:
    rank = Rank([url for url, _ in servers], "distributed", num_servers=receiver)
    assert rank.update(1) is None

    def kill(at: int) -> None:
        if at == 3 and rank.version == 2 and rank.streams == 2:
            os.kill(servers[1][1], signal.SIGKILL)

    if number == 1:
        rank.at = kill
    failures = [rank.update(2), rank.update(3)]
    outcome = (held(rank, servers[0][0]), [str(e) for e in failures if e]) if number == 0 else ()
    rank.close()
    return outcome, rank.streams


@pytest.mark.parametrize("receiver", [0, 1], ids=["one after the other", "at the same time"])
def test_a_server_that_dies_is_dropped(receiver: int) -> None:
    with weight_servers(2) as servers:
        by_rank = run_distributed(a_server_dies, 4, servers, receiver)
    server, failures = by_rank[0][0]
    assert server["held"] == truth(3) and failures == []
    assert [streams for _, streams in by_rank] == ([4, 4, 0, 4] if receiver else [3, 4, 0, 3])


def by_handles(number: int, world: int, servers: list[tuple[str, int]]) -> Any:
    """Each source waits in the middle of its tensors until the others are there."""
    first, second = [url for url, _ in servers]
    sources = numbered(
        [
            WeightSource(0, servers=(first,)),
            WeightSource(1, servers=(first, second)),
            WeightSource(3, servers=(second,)),
        ]
    )
    rank = Rank([first, second], "ipc", "", sources)
    store = dist.distributed_c10d._get_default_store()

    def meet(at: int) -> None:
        if at == COUNT // 2:
            store.set(f"half/{rank.version}/{number}", "")
            store.wait(
                [f"half/{rank.version}/{other}" for other in (0, 1, 3)], timedelta(seconds=20)
            )

    rank.at = meet
    assert rank.update(1) is None and rank.update(2) is None
    on_servers = [held(rank, url) for url in (first, second)] if number == 0 else []
    rank.close()
    return on_servers


def test_sources_hand_their_tensors_to_the_servers_beside_them_at_the_same_time() -> None:
    with weight_servers(2) as servers:
        first, second = run_distributed(by_handles, 4, servers)[0]
    assert first["held"] == truth(2, (0, 1)) and second["held"] == truth(2, (1, 3))
    assert first["buckets"] == second["buckets"] == 2 * 2 * 2, (
        "two updates of two sources, with two buckets each"
    )


def by_relays(number: int, world: int, servers: list[tuple[str, int]]) -> Any:
    """Ranks 0 and 1 are on one node, 2 and 3 on the other; each node lacks a source's tensors."""
    first, second = [url for url, _ in servers]
    sources = numbered(
        [
            WeightSource(0, servers=(first,), relays=(Relay(2, (second,)),)),
            WeightSource(1, servers=(), relays=(Relay(3, (second,)), Relay(0, (first,)))),
            WeightSource(3, servers=(second,), relays=(Relay(1, (first,)),)),
        ]
    )
    rank = Rank([first, second], "ipc", "", sources)
    assert rank.update(1) is None and rank.update(2) is None
    on_servers = [held(rank, url) for url in (first, second)] if number == 0 else []
    rank.close()
    return on_servers, rank.streams


def test_a_node_that_lacks_tensors_gets_them_by_a_relay() -> None:
    with weight_servers(2) as servers:
        by_rank = run_distributed(by_relays, 4, servers)
    assert [server["held"] for server in by_rank[0][0]] == [truth(2)] * 2
    assert [streams for _, streams in by_rank] == [
        2,
        2,
        0,
        2,
    ], "each source reads its tensors once an update"


def only_changes(number: int, world: int, url: str) -> Any:
    """Buckets of four updates: the first, one without changes, one in which a source forgets a
    change, the next.
    """
    rank = Rank(
        [url], "distributed", num_servers=1, weight_changes_only=True, weight_checksums=True
    )
    buckets = []
    for version, update in ((1, 1), (1, 2), (2, 3), (2, 4)):
        if update == 3 and number == 1:
            transport = rank.sync._transport  # type: ignore[union-attr]
            data = tensor(1, 4, 2).view(torch.uint8)
            transport._known["1.4"] = receiver_checksum(data)  # type: ignore[attr-defined]
        rank.version = version
        failure = rank.sync.run(rank.weights, update)
        buckets.append((held(rank, url)["buckets"], type(failure).__name__) if number == 0 else ())
    on_server = held(rank, url)["held"] if number == 0 else {}
    rank.close()
    return buckets, rank.lines, on_server


def test_unchanged_tensors_are_not_sent_and_a_stale_one_is_caught() -> None:
    with weight_servers(1) as [(url, _)]:
        buckets, lines, on_server = run_distributed(only_changes, 4, url)[0]
    count = len(SOURCES) * COUNT
    assert buckets == [
        (count, "NoneType"),
        (count, "NoneType"),
        (2 * count - 1, "NoServerError"),
        (3 * count - 1, "NoneType"),
    ]
    assert lines == [f"weights 3: server {url}: 1.4 is stale"] and on_server == truth(2)


def to_disk(number: int, world: int, url: str, folder: str) -> Any:
    rank = Rank([url], "disk", folder)
    first = rank.update(1)  # the server takes no checkpoints: it fails when all is written
    if number == 3:
        os.chmod(folder, 0o700)
        rank.sync._transport._directory = Path(folder) / "elsewhere"  # type: ignore[union-attr]
        (Path(folder) / "elsewhere").mkdir()
    second = rank.update(2)
    rank.close()
    return type(first).__name__, str(second), isinstance(second, DiskError)


def test_sources_write_one_checkpoint_and_a_source_that_cannot_is_an_error(tmp_path: Path) -> None:
    with weight_servers(1) as [(url, _)]:
        by_rank = run_distributed(to_disk, 4, url, str(tmp_path))
    assert by_rank[0][0] == "NoServerError" and by_rank[0][2] and "elsewhere" in by_rank[0][1]
    assert all(each == ("NoneType", "None", False) for each in by_rank[1:])
    [checkpoint] = tmp_path.glob("weights-*")
    names = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                names.add(name)
                assert checksum(opened.get_tensor(name)) == truth(1)[name]
    assert names == set(truth(1))


class TouchesAFile:
    """What an attacker who reaches the ranks' store would write there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def a_foreign_report(number: int, world: int, file: str) -> list[str]:
    received: list[Any] = []
    config = ServerConfig(urls=("http://127.0.0.1:9",))
    client = None
    if number == 0:
        client = RolloutClient(config.urls, config, MODEL, str, api=SGLangAPI(), log=print)
    sync = WeightSync(config, client, None, numbered([WeightSource(0)]))
    results = {0: ["sent"]} if number == 0 else {}
    sync._report("0/results", 1, results, received.append, list)
    store = dist.distributed_c10d._get_default_store()
    if number == 0:
        store.set("weights/1/results/0", pickle.dumps(TouchesAFile(Path(file))))
        assert received == [[["sent"]]]
    with contextlib.suppress(_FailedError):
        sync._report("1/results", 1, {}, received.append, list)
        return ["the report was taken"]
    if client is not None:
        client.close()
    return [str(sync._failure)]


def test_a_report_that_no_rank_sent_is_refused_and_not_run(tmp_path: Path) -> None:
    [line] = run_distributed(a_foreign_report, 2, str(tmp_path / "ran"))[0]
    assert "a message between ranks is damaged" in line and not (tmp_path / "ran").exists()
