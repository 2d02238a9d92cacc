"""A served model, evaluated by us and by lm-eval: the same accuracy, from real requests."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.tools.evaluate.__main__ import main
from tests.sglang.test_servers import MODULE
from tests.support.command_line import write_rows
from tests.support.evaluated_steps import evaluate_on_own_servers
from tests.support.harness_environment import harness_python
from tests.support.server_clients import checkpoint_stream, engine_on

LENGTH = 6
SOLVED = 7
OTHERS = 5


@pytest.fixture(scope="module")
def served(sglang_url: str, sglang_model: str) -> str:
    """The URL of a server that has the weights of the model's directory."""
    with closing(engine_on([sglang_url], sglang_model)) as engine:
        engine.update_weights(checkpoint_stream(sglang_model), version=0)
    return sglang_url


@pytest.fixture(scope="module")
def task(sglang_model, tmp_path_factory) -> Path:
    """Twelve prompts. The answers of seven are what the model says to them by greedy decoding."""
    tokenizer = AutoTokenizer.from_pretrained(sglang_model)
    engine = EmbeddedEngine(sglang_model, tokenizer=tokenizer)
    texts = [f"{word}{i}" for i, word in enumerate(["ab", "cde", "f", "ghij"] * 250)]
    asked = [
        Prompt(i, tokenizer(text, return_tensors="np").input_ids[0], text)
        for i, text in enumerate(texts)
    ]
    said = engine.generate(asked, SamplingParams(1, LENGTH, temperature=0.0), seed=0)
    plain = [
        (text, sample.text)
        for text, sample in zip(texts, said, strict=True)
        if sample.text.isalnum()
    ]
    chosen = plain[: SOLVED + OTHERS]
    assert len(chosen) == SOLVED + OTHERS
    rows = [
        {"prompt": text, "answer": answer if i < SOLVED else answer[::-1] + "?"}
        for i, (text, answer) in enumerate(chosen)
    ]
    return write_rows(tmp_path_factory.mktemp("task") / "echo.jsonl", rows)


def test_our_evaluation(served, sglang_model, task, tmp_path):
    assert (
        main(
            [
                served,
                "--tasks",
                str(task),
                "--output",
                str(tmp_path),
                f"model.path={sglang_model}",
                "data.verifier=exact_match",
                "data.verifier_timeout=null",
                "evaluation.temperature=0",
                f"rollout.max_response_length={LENGTH}",
            ]
        )
        == 0
    )
    (score,) = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
    assert (score["label"], score["prompts"]) == ("served", SOLVED + OTHERS)
    assert score["accuracy"]["mean"] == pytest.approx(SOLVED / (SOLVED + OTHERS))


@pytest.mark.slow
def test_lm_eval(served, sglang_model, task, tmp_path):
    config = {
        "task": "echo",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(task)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {
            "until": ["<eos>"],
            "max_gen_toks": LENGTH,
            "temperature": 0.0,
            "do_sample": False,
        },
    }
    (tmp_path / "echo.yaml").write_text(yaml.safe_dump(config))
    arguments = f"model={sglang_model},base_url={served}/v1/completions,tokenizer_backend=none,tokenized_requests=False"
    command = [
        str(Path(harness_python()).with_name("lm_eval")),
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "echo",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "results"),
    ]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]["echo"]
    assert results["exact_match,none"] == pytest.approx(SOLVED / (SOLVED + OTHERS))


@pytest.mark.slow
def test_all_steps_of_a_run_on_a_server_that_it_starts(sglang_python, tmp_path):
    evaluate_on_own_servers("sglang", sglang_python, MODULE, tmp_path)
