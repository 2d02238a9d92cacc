"""What an update does where there is no server to take it.

With servers: tests/sglang/test_weights.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.config import ServerConfig, VLLMConfig
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.vllm.vllm_api import VLLMAPI
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.transport import WeightTransport
from megatron_gspo.weight_transport.weight_update import TRANSPORTS, make_transport
from tests.support.server_engine import update_servers

INFO = ServerInfo(
    url="http://127.0.0.1:30000",
    version="0.5.23",
    start_id="1",
    weight_version="default",
    model_path="m",
    device="cpu",
    tp_size=1,
    pp_size=1,
    dp_size=1,
    max_input_tokens=None,
    max_total_tokens=None,
    routed_experts=True,
    update_session=True,
)


def transport_of(name: str, folder: Path) -> WeightTransport:
    config = ServerConfig(weight_transport=name, weight_dir=str(folder))  # type: ignore[arg-type]
    return make_transport(config, SGLangAPI())


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("name", ["disk", "distributed"])
def test_every_transport_to_vllm_is_told_of_checksums(
    name: str, checksums: bool, tmp_path: Path
) -> None:
    config = VLLMConfig(weight_transport=name, weight_dir=str(tmp_path), weight_checksums=checksums)  # type: ignore[arg-type]
    assert make_transport(config, VLLMAPI()).checksums is checksums


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def stream(read: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in ("a", "b", "c"):
        read.append(name)
        yield name, torch.ones(4)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_nobody_listens(name: str, loop: EventLoop, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    session = loop.run(open_session())
    read: list[str] = []
    transport = transport_of(name, tmp_path)
    failures = update_servers(
        loop,
        [ServerClient(url, session)],
        lambda: stream(read),
        transport,
        version="v:1",
        bucket_bytes=16,
        timeout=60,
    )
    assert list(failures) == [url] and f"server {url}/server_info: no connection" in failures[url]
    assert read == (["a", "b", "c"] if name == "disk" else [])
    loop.run(session.close())


def test_what_a_transport_does_not_support(tmp_path: Path) -> None:
    made = [transport_of(name, tmp_path) for name in TRANSPORTS]

    def refused(words: str, **changes: object) -> set[str]:
        reasons = [transport.unsupported(replace(INFO, **changes)) for transport in made]
        assert all(words in reason for reason in reasons if reason)
        return {name for name, reason in zip(TRANSPORTS, reasons, strict=True) if reason}

    assert refused("") == set()
    assert refused("dp_size 2", dp_size=2) == {"tensor", "distributed", "ipc"}
    assert refused("pp_size 2", pp_size=2) == {"distributed"}


def test_checkpoints_are_written_to_the_run_directory_unless_another_is_set(tmp_path: Path) -> None:
    for weight_dir, expected in (
        (None, tmp_path / "weights"),
        (str(tmp_path / "shared"), tmp_path / "shared"),
    ):
        config = ServerConfig(weight_transport="disk", weight_dir=weight_dir)
        transport = make_transport(config, SGLangAPI(), run_dir=tmp_path)
        transport.prepare("run:1")
        transport.publish(0)
        assert isinstance(transport, DiskTransport)
        assert transport.checkpoint == expected / "weights-run-1"
