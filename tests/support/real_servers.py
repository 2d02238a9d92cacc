"""What the tests with real servers share: they are skipped without an engine's interpreter, and
serve a tiny model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.tiny_models import save_tiny_model


def skip_without_python(
    config: pytest.Config, items: Sequence[pytest.Item], folder: Path, engine: str
) -> None:
    """Skip the tests of ``folder`` unless pytest was given ``--ENGINE-python``; engine: in
    lower case.
    """
    if config.getoption(f"--{engine}-python") is None:
        skip = pytest.mark.skip(reason=f"needs a real server: make test-{engine}")
        for item in items:
            if folder in item.path.parents:
                item.add_marker(skip)


def python_of(config: pytest.Config, engine: str) -> str:
    """The interpreter that has the engine, as an absolute path."""
    return str(Path(config.getoption(f"--{engine}-python")).absolute())


def save_character_model(
    folder: Path, kind: str = "moe", seed: int = 0, words: Sequence[str] = (), **sizes: int
) -> str:
    """Write a random float32 model, as a rule a Qwen3-MoE of 4 layers with 8 experts, 2 active, and
    a character tokenizer.

    words: texts that are one token each.
    """
    tokenizer = character_tokenizer(words)
    save_tiny_model(folder, kind, seed, vocab_size=-(-len(tokenizer) // 8) * 8, **sizes)
    tokenizer.save_pretrained(folder)
    return str(folder)


def processes_of(url: str, module: str) -> list[psutil.Process]:
    """The server at a URL, which runs ``python -m module``, its children, and the supervisor
    that started it.
    """
    port = url.rsplit(":", 1)[1]
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if module in command and port in command:
            processes += [process, *process.children(recursive=True)]
    return list({process.pid: process for process in processes}.values())


def main_process(url: str, module: str) -> psutil.Process:
    """The process of the server at a URL, child of its supervisor."""
    return next(
        process for process in processes_of(url, module) if process.cmdline()[1:3] == ["-m", module]
    )


def signal_server(url: str, module: str, number: signal.Signals) -> None:
    """Send a signal to all processes of the server at a URL, its supervisor included."""
    os.killpg(os.getpgid(main_process(url, module).pid), number)
