"""Ports of started servers."""

from __future__ import annotations

import socket

import pytest

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError
from megatron_gspo.servers.ports import LOOPBACK, choose_ports


def test_ports_are_those_asked_for_or_free_ones():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"sglang.port={port - 1}: port {port} is in use on 127.0.0.1"
        ):
            choose_ports(ServerConfig(port=port - 1, num_servers=2), LOOPBACK)
    config = ServerConfig(num_servers=3)
    first = choose_ports(config, LOOPBACK)
    assert len(set(first)) == 3 and all(30_000 <= port < 32_768 for port in first)
    assert not set(first) & set(choose_ports(config, LOOPBACK, avoid=first))
    assert len(choose_ports(config, LOOPBACK, count=1)) == 1


def test_no_free_port_is_an_error_that_names_the_key(monkeypatch):
    monkeypatch.setattr("megatron_gspo.servers.ports.is_free", lambda host, port: False)
    with pytest.raises(InputError, match=r"sglang.port: no 1 free ports in 30000..32767; set it"):
        choose_ports(ServerConfig(num_servers=1), LOOPBACK)
