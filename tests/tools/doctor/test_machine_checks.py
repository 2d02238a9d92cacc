"""Threads, limits, and ports in use."""

from __future__ import annotations

import socket

import pytest

from megatron_gspo.config import SGLangConfig, load_config
from megatron_gspo.tools.doctor.machine_checks import check_ports, judge_ephemeral, judge_files, judge_threads
from tests.support.ports import free_port


@pytest.mark.parametrize(
    "setting, cores, ranks, gpu, level",
    [
        ("1", 2, 2, False, "ok"),
        ("1", 2, 8, False, "note"),
        ("2", 2, 2, False, "warning"),
        (None, 2, 2, False, "warning"),
        (None, 2, 1, False, "note"),
        (None, 1, 1, False, "ok"),
        ("8", 96, 8, True, "ok"),
        ("96", 96, 8, True, "warning"),
        ("many", 2, 1, False, "warning"),
    ],
)
def test_threads(setting, cores, ranks, gpu, level):
    assert judge_threads(setting, cores, ranks, gpu=gpu).level == level


def test_threads_say_what_to_set():
    assert judge_threads("96", 96, 8, gpu=True).fix == "set OMP_NUM_THREADS=12"
    assert judge_threads("4", 4, 2, gpu=False).fix == "set OMP_NUM_THREADS=1"


def test_files():
    assert judge_files(1024).level == "warning"
    assert judge_files(4096).level == judge_files(-1).level == "ok"


def test_a_server_port_in_use_is_an_error(config_file):
    first = free_port()
    servers = {"num_servers": 2, "port": first, "weight_transport": "tensor"}
    file = config_file(rollout={"engine": "sglang"}, sglang=servers)
    config = load_config(file)
    environment = {"WORLD_SIZE": "2"}
    assert [f.level for f in check_ports(config, environment) if f.check == "ports.sglang"] == ["ok"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        [found] = [f for f in check_ports(config, environment) if f.check == "ports.sglang"]
    assert found.level == "error"
    assert f"sglang.port = {first}: port {first + 1} is in use on 127.0.0.1" in found.what


def test_ports_of_outgoing_connections():
    assert judge_ephemeral(SGLangConfig(), [30000, 30001], (32768, 60999)) == []
    assert judge_ephemeral(SGLangConfig(), [40000], None) == []
    [found] = judge_ephemeral(SGLangConfig(), [32767, 32768], (32768, 60999))
    assert found.level == "note" and "port 32768 is among" in found.what and found.fix == "choose one below 32768"
