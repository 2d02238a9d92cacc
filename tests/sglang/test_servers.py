"""Real local servers: they serve, restart after SIGKILL, end with their trainer, and report why they can't start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_gspo.config import SGLangConfig
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import main_process, processes_of
from tests.support.waiting import wait_for

MODULE = "sglang.launch_server"
KEY = "a-key-that-nobody-may-see"
# A trainer, by torchrun: its servers must not take its place in the process group for theirs.
TRAINER = """
import sys, time
from megatron_gspo.config import SGLangConfig
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers

model, python, log_dir, key_file = sys.argv[1:]
config = SGLangConfig(num_servers=1, python=python, api_key_file=key_file)
print(LocalServers(SGLangLaunch(config, model, log_dir=log_dir)).start()[0], flush=True)
time.sleep(600)
"""
TORCHRUN = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
                TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip


def generate(url: str, key: str = "") -> dict:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True, "return_routed_experts": True}  # fmt: skip
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/generate", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def trainer(sglang_model: str, sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A process that starts a server of its own, begun while other tests run. Its output's first line is the URL."""
    log_dir = tmp_path_factory.mktemp("trainer")
    (log_dir / "key").write_text(KEY + "\n")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, sglang_model, sglang_python, str(log_dir), str(log_dir / "key")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **TORCHRUN},
    )  # fmt: skip
    process.log_dir = log_dir
    yield process
    process.kill()
    process.communicate()


def test_a_server_serves_and_comes_back_after_sigkill(sglang_server, trainer):
    url = sglang_server.urls[0]
    before = generate(url)
    assert len(before["output_ids"]) == 4 and before["meta_info"]["routed_experts"]
    old = processes_of(url, MODULE)
    main_process(url, MODULE).kill()
    assert wait_for(sglang_server.poll, 30).died == [url]
    changes = wait_for(sglang_server.poll, 240)
    assert changes.restarted == [url] and not changes.given_up
    assert not [process.pid for process in old if process.is_running()], "left behind by the first life"
    assert generate(url)["meta_info"]["completion_tokens"] == 4


def test_servers_start_from_a_worker_of_torchrun(trainer):
    trainer.url = trainer.stdout.readline().strip()
    assert trainer.url.startswith("http://127.0.0.1:")


def test_the_api_key_is_asked_for_and_nobody_sees_it(trainer):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        generate(trainer.url)
    assert generate(trainer.url, KEY)["meta_info"]["completion_tokens"] == 4
    commands = [" ".join(process.cmdline()) for process in processes_of(trainer.url, MODULE)]
    assert len(commands) >= 4 and not any(KEY in command for command in commands)
    log = Path(trainer.log_dir) / "server_0.log"
    assert log.stat().st_mode & 0o077 == 0
    assert KEY not in log.read_text() and re.search(r"\bapi_key\W+'\*\*\*'", log.read_text()), "sglang shows it there"
    secret = commands[0].split("--config ")[1].split()[0]
    assert not Path(secret).exists(), "the file with the key is removed when it has been read"


def test_a_server_ends_with_its_trainer(trainer):
    left = processes_of(trainer.url, MODULE)
    assert any("sglang::scheduler" in " ".join(process.cmdline()) for process in left)
    trainer.kill()
    wait_for(lambda: not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 30)


@pytest.mark.parametrize(("args", "message"), [
    (("--no-such-option", "1"), "correct sglang.server_args.*--no-such-option"),
    (("--enable-deterministic-inference",), "none without a GPU; .*deterministic inference, but .* 'torch_native'"),
])  # fmt: skip
def test_arguments_that_sglang_refuses_are_named(sglang_model, sglang_python, tmp_path, args, message):
    config = SGLangConfig(num_servers=1, python=sglang_python, server_args=args)
    with pytest.raises(EngineError, match=message) as error:
        LocalServers(SGLangLaunch(config, sglang_model, log_dir=str(tmp_path))).start()
    assert "\n" not in str(error.value) and str(tmp_path / "server_0.log") in str(error.value)
