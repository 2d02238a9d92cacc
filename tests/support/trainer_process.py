"""A trainer in a process of its own, with a server that it started and whose API key nobody may
see.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from tests.support.real_servers import processes_of
from tests.support.server_clients import CONFIGS
from tests.support.waiting import wait_for

KEY = "a-key-that-nobody-may-see"
_SCRIPT = """
import sys, time
import megatron_gspo.config
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.server_processes import LocalServers

kind, section, model, python, log_dir, key_file = sys.argv[1:]
settings = {"num_servers": 1, "python": python, "api_key_file": key_file, "start_timeout": 1800.0}
config = getattr(megatron_gspo.config, section)(**settings)
print(LocalServers(SERVER_KINDS[kind].launch(config, model, "float32", log_dir=log_dir)).start()[0], flush=True)
time.sleep(3600)
"""
# By torchrun: the server must not take the trainer's place in the process group for its own.
_TORCHRUN = dict(
    RANK="0",
    WORLD_SIZE="2",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="29500",
    TORCHELASTIC_USE_AGENT_STORE="True",
)


@dataclass
class TrainerProcess:
    """module: that the server's process runs. folder: with the server's log and the key."""

    process: subprocess.Popen
    module: str
    folder: Path

    @cached_property
    def url(self) -> str:
        """Of the server; waits until it answers."""
        line = self.process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), line
        return line

    @property
    def key_file(self) -> str:
        return str(self.folder / "key")


@contextmanager
def trainer_process(
    kind: str, module: str, model: str, python: str, folder: Path
) -> Iterator[TrainerProcess]:
    """Begins to start the server, and kills the trainer at the end. kind: "sglang" or "vllm"."""
    (folder / "key").write_text(KEY + "\n")
    arguments = [kind, CONFIGS[kind].__name__, model, python, str(folder), str(folder / "key")]
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_TORCHRUN},
    )
    try:
        yield TrainerProcess(process, module, folder)
    finally:
        process.kill()
        process.communicate()


def require_and_hide_the_key(
    trainer: TrainerProcess, generate: Callable[[str, str], object]
) -> None:
    """The server wants the key, and no command line, log or file that is left shows it. generate:
    of a URL and a key, one request."""
    with pytest.raises(urllib.error.HTTPError, match="401"):
        generate(trainer.url, "")
    generate(trainer.url, KEY)
    commands = [
        " ".join(process.cmdline()) for process in processes_of(trainer.url, trainer.module)
    ]
    assert len(commands) >= 2 and not any(KEY in command for command in commands)
    log = trainer.folder / "server_0.log"
    assert log.stat().st_mode & 0o077 == 0
    text = log.read_text()
    assert KEY not in text and re.search(r"\bapi_key\W+'\*\*\*'", text), (
        "the server's own list of settings has it"
    )
    secret = commands[0].split("--config ")[1].split()[0]
    assert not Path(secret).exists(), "the file with the key is removed when it has been read"


def end_with_the_trainer(trainer: TrainerProcess) -> None:
    """The server and all of its processes end when the trainer is killed."""
    left = processes_of(trainer.url, trainer.module)
    assert len(left) >= 2
    trainer.process.kill()
    wait_for(
        lambda: not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 30
    )
