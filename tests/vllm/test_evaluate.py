"""`megatron-gspo evaluate` on a real vLLM server: the answers and the accuracy of the model."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.tools.evaluate.__main__ import main
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.command_line import write_rows
from tests.support.evaluated_steps import evaluate_on_own_servers
from tests.support.server_clients import checkpoint_stream, engine_on
from tests.support.ties import TIE, smallest_margin
from tests.support.transformers_reference import load_reference
from tests.vllm.test_faults_in_runs import MODULE

LENGTH = 6
SOLVED = 7
OTHERS = 5
MARGIN = 1e-4  # between the two best logits: float32 is off by 2e-6
TOKENIZER = character_tokenizer()
EXACT = "def score(response, prompt):\n    return float(response == prompt.answer)\n"


@pytest.fixture(scope="module")
def served(
    vllm_server: LocalServers, vllm_model: str, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The URL of the server, which has the weights of the model's directory."""
    limits = {"health_timeout": 60.0, "update_timeout": 300.0}  # of a busy machine
    engine = engine_on(
        vllm_server.urls,
        vllm_model,
        kind="vllm",
        routes=False,
        weight_transport="disk",
        folder=tmp_path_factory.mktemp("weights"),
        **limits,
    )
    engine.update_weights(checkpoint_stream(vllm_model), version=0)
    engine.close()
    return vllm_server.urls[0]


@pytest.fixture(scope="module")
def model(vllm_model: str) -> torch.nn.Module:
    """Transformers' model in float64."""
    return load_reference(vllm_model)


def encode(text: str) -> torch.Tensor:
    return TOKENIZER(text, return_tensors="pt").input_ids


@torch.no_grad()
def greedy(model: torch.nn.Module, text: str) -> tuple[str, float]:
    """What the model says to a text, and the smallest margin by which it is that."""
    tokens = encode(text)
    margin = math.inf
    said = []
    while len(said) < LENGTH and (not said or said[-1] != TOKENIZER.eos_token_id):
        best = model(input_ids=tokens, use_cache=False).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        said.append(int(best.indices[0]))
        tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
    is_clear = smallest_margin(model, tokens[0].numpy()) > TIE
    return TOKENIZER.decode(said, skip_special_tokens=True), margin if is_clear else 0.0


@pytest.fixture(scope="module")
def said(model: torch.nn.Module) -> dict[str, str]:
    """Twelve prompts of 3 to 60 characters, and what the model says to each by greedy decoding."""
    rng = np.random.default_rng(0)
    answers = {}
    for length in rng.integers(3, 60, 2 * (SOLVED + OTHERS)):
        text = "".join(rng.choice(list(string.ascii_letters + string.digits), length))
        answer, margin = greedy(model, text)
        if margin > MARGIN and len(answers) < SOLVED + OTHERS:
            answers[text] = answer
    assert len(answers) == SOLVED + OTHERS and len(set(answers.values())) > OTHERS, (
        "prompts must matter"
    )
    return answers


def evaluation(
    where: str, model: str, tasks: Path, output: Path, verifier: str, *more: str
) -> list[str]:
    """The arguments of an evaluation.

    where: a server's URL, or the model's directory. verifier: its text.
    """
    file = output.with_suffix(".py")
    file.write_text(verifier)
    engine = (
        ["rollout.engine=vllm", "vllm.health_interval=60", f"model.path={model}"]
        if where != model
        else []
    )
    return [
        where,
        "--tasks",
        str(tasks),
        "--output",
        str(output),
        *engine,
        "model.dtype=float32",
        "data.verifier_timeout=null",
        f"data.verifier={file}:score",
        *more,
    ]


def accuracy(output: Path) -> float:
    (score,) = json.loads((output / "evaluation.json").read_text())["scores"]
    return score["accuracy"]["mean"]


def responses(output: Path) -> list[dict[str, Any]]:
    """All of them, by prompt and sample."""
    (file,) = (output / "responses").rglob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return sorted(records, key=lambda record: (record["prompt_index"], record["sample_index"]))


def test_greedy_answers_are_those_of_transformers(served, vllm_model, said, tmp_path):
    rows = [
        {"prompt": text, "answer": answer if i < SOLVED else f"not {answer}"}
        for i, (text, answer) in enumerate(said.items())
    ]
    tasks = write_rows(tmp_path / "echo.jsonl", rows)
    settings = ["evaluation.temperature=0", f"rollout.max_response_length={LENGTH}"]
    for where in (served, vllm_model):
        output = tmp_path / ("served" if where == served else "embedded")
        assert main(evaluation(where, vllm_model, tasks, output, EXACT, *settings)) == 0
        assert [record["response"] for record in responses(output)] == list(said.values())
        assert accuracy(output) == pytest.approx(SOLVED / (SOLVED + OTHERS))


@pytest.mark.slow
def test_all_steps_of_a_run_on_a_server_that_it_starts(vllm_python, tmp_path):
    evaluate_on_own_servers("vllm", vllm_python, MODULE, tmp_path)
