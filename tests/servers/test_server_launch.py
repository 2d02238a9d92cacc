"""What the launch of every engine shares: the API key and the environment."""

from __future__ import annotations

import sys

from megatron_gspo.config import ServerConfig
from megatron_gspo.servers.server_launch import read_api_key, server_environment


def test_the_key_is_the_first_line_of_its_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(" k-secret \nmore\n")
    assert read_api_key(ServerConfig(api_key_file=str(file))) == "k-secret"
    assert read_api_key(ServerConfig()) is None


def test_the_environment_of_a_worker_is_not_a_servers():
    base = {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ROLE_WORLD_SIZE": "8",
        "MY_RANK": "kept",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": "/trainer",
    }
    kept = {"PATH": "/bin", "MY_RANK": "kept", "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONSAFEPATH": "1"}
    assert server_environment("/other", base) == kept
    assert server_environment(sys.executable, base) == {**kept, "PYTHONPATH": "/trainer"}
