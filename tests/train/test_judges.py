"""A run whose rewards are those of a ranking and of a reward model, each of a source of prompts."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from examples.judge.stand_in import ChatCompletions, Judge
from megatron_gspo.config.load import read_file
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.judge_server import JudgeServer
from tests.support.prompt_rows import write_jsonl
from tests.support.training_runs import WORD, base_config, exported, launch, records, tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "judge"


def verifier_of(example: str, **options: Any) -> dict[str, Any]:
    """The verifier's keys of an example, with other options."""
    data = read_file(EXAMPLES / example)["data"]
    keys = {name: value for name, value in data.items() if name.startswith("verifier")}
    return {**keys, "verifier_options": {**data["verifier_options"], **options}}


@contextlib.contextmanager
def stand_in() -> Iterator[str]:
    """The URL of the examples' judge."""
    with Judge(("127.0.0.1", 0), ChatCompletions) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def save_reward_model(folder: Path) -> str:
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(tokenizer),
        num_labels=1,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def samples_of(run_dir: Path) -> list[list[dict[str, Any]]]:
    """Of each step."""
    files = sorted((run_dir / "samples").glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


HALF_RIGHT = """
def score(response, prompt):
    return float(prompt.answer < "m")
"""


def test_a_source_for_a_ranking_and_one_for_a_reward_model(tmp_path: Path):
    """And another verifier for held-out responses."""
    rows = [
        {"prompt": f"{WORD} {word}", "answer": word[::-1]} for word in ("sun", "sea", "sky", "dog")
    ]
    prompts = str(write_jsonl(tmp_path / "words.jsonl", rows))
    (tmp_path / "half_right.py").write_text(HALF_RIGHT)
    model = tiny_model(tmp_path / "model")
    with stand_in() as url:
        ranked = verifier_of("tiny_gspo.yaml", servers=[url]) | {"verifier": "judge_ranking"}
        modelled = {
            "verifier": "reward_model",
            "verifier_options": {"path": save_reward_model(tmp_path / "reward")},
        }
        config = base_config(
            model,
            tmp_path / "run",
            data={
                "task": None,
                "verifier": None,
                "sources": [
                    {"name": "ranked", "prompts": prompts, **ranked},
                    {"name": "modelled", "prompts": prompts, "eval_prompts": prompts, **modelled},
                ],
            },
            training={"steps": 2},
            evaluation={"verifier": f"{tmp_path / 'half_right.py'}:score"},
            tracking={"samples_per_step": 16},
            checkpoint={"export_hf": False},
        )
        launch(config, 2)
    before, *steps = records(tmp_path / "run")
    assert [row["eval/accuracy"] for row in (before, steps[-1])] == [0.5, 0.5]
    assert len(steps) == 2 and all(row["verifier/error"] == 0 for row in steps)
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for step, samples in enumerate(samples_of(tmp_path / "run")):
        for sample in samples:
            if sample["source"] == "ranked":
                groups.setdefault((step, sample["prompt_index"]), []).append(sample)
        rewards = {sample["reward"] for sample in samples if sample["source"] == "modelled"}
        assert len(rewards) > 1 and all(map(math.isfinite, rewards))
    assert len(groups) == 4
    for group in groups.values():
        rewards = {sample["reward"] for sample in group}
        assert rewards == {0.5} or (min(rewards), max(rewards)) == (0.0, 1.0)


def length(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"reason": "its length", "score": len(text.partition("# Response\n\n")[2]) % 7 / 7}


def test_a_judge_that_dies_and_comes_back(tmp_path: Path):
    """Before the second step's first verdict: the run ends with a line and a checkpoint, and goes on
    to the weights of a run whose judge lived."""
    model = tiny_model(tmp_path / "model")

    def config(run: str, server: JudgeServer) -> dict[str, Any]:
        options = verifier_of("tiny_gspo.yaml", servers=[server.url], request_timeout=2.0)
        options["verifier_timeout"] = 8.0
        return base_config(
            model,
            tmp_path / run,
            data=options,
            tracking={"samples_per_step": 16},
            evaluation={"at_start": False},
            checkpoint={"save_interval": 10},
        )

    with JudgeServer(length) as server:
        launch(config("whole", server))
    first = {sample["prompt"] for sample in samples_of(tmp_path / "whole")[0]}
    died = threading.Event()

    def until_the_second_step(text: str, schema: dict[str, Any]) -> dict[str, Any] | None:
        if any(question in text for question in first):
            return length(text, schema)
        died.set()
        return None

    with JudgeServer(until_the_second_step) as server:
        url = server.url
        ending = threading.Thread(target=lambda: died.wait() and server.close())
        ending.start()
        life = launch(config("interrupted", server), check=False)
    ending.join()
    assert life.codes == [1], life.log[-2000:]
    last = life.log.strip().splitlines()[-1]
    assert "failed on all 16 responses of a batch" in last and url in last, last
    assert "saved, start again to resume from" in last, last
    assert len(records(tmp_path / "interrupted")) == 1
    with JudgeServer(length) as server:
        launch(config("interrupted", server))
    assert records(tmp_path / "interrupted") == records(tmp_path / "whole")
    expected = exported(tmp_path / "whole")
    resumed = exported(tmp_path / "interrupted")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
