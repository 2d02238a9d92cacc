"""The cold start of a tiny model for an agent (docs/agent_packages.md).

A teacher that makes mistakes plays the agent of a training config. Its replies are demonstrations,
on which a random model of 330,000 parameters is trained: it learns the format and the mistakes.

python examples/agents/tiny/cold_start.py examples/agents/tiny/calculator.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from megatron_gspo.agents.agent_host import AgentHost, RunRequest
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.function_program import FunctionProgram
from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.agents.players import ProgramPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.runner import CLIENT_ENV
from megatron_gspo.config import Config, load_config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.tools.compare.cold_start import train
from megatron_gspo.tools.make_tiny_model import TinyModel, character_tokenizer, write_tiny_model

HERE = Path(__file__).parent
TRAINING = 4000  # rows, the demonstrated ones among them
HELD_OUT = 100
DRAWN = 9000  # of which some are equal
CONCURRENT = 4
NO_TOKENS = np.zeros(1, np.int64)  # agents get the text

Row = dict[str, str]
Reply = Callable[[str, Random], str]


class Teacher:
    """A `Generator` that replies by a function of the messages' text."""

    paused_seconds = 0.0  # no trainer makes calls wait

    def __init__(self, tokenizer: Any, reply: Reply) -> None:
        self._tokenizer = tokenizer
        self._reply = reply
        self.demonstrations: list[Row] = []

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        text = self._tokenizer.decode(prompt.tolist())
        reply = self._reply(text, Random(seed))
        self.demonstrations.append({"prompt": text, "answer": reply})
        ids = [*self._tokenizer.encode(reply), self._tokenizer.eos_token_id]
        return Generation(np.array(ids), None, np.zeros(len(ids), np.int32), "stop")


def tiny_tokenizer(words: Sequence[str] = ()) -> Any:
    """Of characters and `words`, with Qwen's format of calls."""
    tokenizer = character_tokenizer(words)
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    return tokenizer


async def play(config: Config, rows: Sequence[Row], reply: Reply) -> tuple[list[Row], float]:
    """The demonstrations of a teacher on tasks, and the mean of its rewards."""
    tokenizer = tiny_tokenizer()
    agents = config.agents
    assert agents.function is not None
    program = FunctionProgram(
        agents.function, CLIENT_ENV | agents.env, python=agents.python or sys.executable
    )
    host = AgentHost(
        AgentEndpoint(TemplateRendering(tokenizer, [tokenizer.eos_token_id])),
        ProgramPlayer(program),
        RunLimits(max_calls=agents.max_calls),
        concurrent_runs=CONCURRENT,
    )
    teacher = Teacher(tokenizer, reply)
    requests = [
        RunRequest(
            Prompt(index, NO_TOKENS, row["prompt"], row.get("answer", ""), dict(row)),
            sample_index=0,
            seed=0,
        )
        for index, row in enumerate(rows)
    ]
    try:
        samples = await host.samples(requests, teacher, max_call_length=4096)
    finally:
        await host.close()
    return teacher.demonstrations, float(np.mean([sample.reward for sample in samples]))


def repeated_texts(demonstrations: Sequence[Row]) -> list[str]:
    """What most prompts have in common, for a token each: beginning, end, and what is between
    digits."""
    first = [row["prompt"] for row in demonstrations if "<tool_response>" not in row["prompt"]]
    head = os.path.commonprefix(first)
    tail = os.path.commonprefix([prompt[len(head) :][::-1] for prompt in first])[::-1]
    counts: Counter[str] = Counter()
    for row in demonstrations:
        text = row["prompt"].removeprefix(head).replace(tail, "0") + "0" + row["answer"]
        # A reply's tokens are its own.
        counts.update(set(re.split(r"\d|<eos>|(?<=assistant\n)", text)))
    common = [text for text, count in counts.items() if count * 50 > len(demonstrations)]
    return [head, tail, *sorted(text for text in common if len(text) > 1)]


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """A row a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="training config, beside the task's .py file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    task = importlib.import_module(options.config.stem)
    folder = Path(config.model.path).parents[1]
    folder.mkdir(parents=True, exist_ok=True)

    random = Random(0)
    drawn = [task.row(random) for _ in range(DRAWN)]
    rows = list({row["prompt"]: row for row in drawn}.values())
    training = rows[:TRAINING]
    write_rows(folder / "tasks.jsonl", training)
    write_rows(folder / "held_out.jsonl", rows[TRAINING : TRAINING + HELD_OUT])

    shown = training[: task.DEMONSTRATED]
    demonstrations, reward = asyncio.run(play(config, shown, task.reply))
    print(f"the teacher solves {100 * reward:.1f} % of {len(shown)} tasks", flush=True)
    write_rows(folder / "demonstrations.jsonl", demonstrations)

    words = repeated_texts(demonstrations)
    size = TinyModel(layers=2, experts=4, expert_width=64)
    write_tiny_model(folder / "model", size, words=words)
    tiny_tokenizer(words).save_pretrained(folder / "model")
    paths = [
        f"run_dir={folder}/cold_start",
        f"model.path={folder}/model",
        f"data.prompts={folder}/demonstrations.jsonl",
    ]
    train(HERE / "cold_start.yaml", 1, paths)


if __name__ == "__main__":
    main()
