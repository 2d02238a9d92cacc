"""The config of an evaluation: what it takes from a run, and what it never does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import ConfigError
from megatron_gspo.tools.evaluate.settings import evaluation_config, given_keys

OUT = Path("out")
RUN = {
    "seed": 5,
    "run_dir": "elsewhere",
    "model": {"path": "start", "dtype": "float32", "recompute_granularity": "full"},
    "parallel": {"tensor_model_parallel_size": 8},
    "algorithm": {"name": "grpo"},
    "data": {
        "task": {"name": "spell_backward"},
        "verifier": "reasoning_gym",
        "max_prompt_length": 32,
    },
    "rollout": {
        "engine": "sglang",
        "rollout_batch_size": 64,
        "max_response_length": 99,
        "max_staleness": 2,
    },
    "sglang": {
        "urls": ["http://trainer:1"],
        "colocated": True,
        "weight_transport": "disk",
        "request_timeout": 5.0,
    },
    "training": {"steps": 9, "global_batch_size": 512},
    "evaluation": {"n_samples": 4, "temperature": 0.5, "eval_interval": 3},
    "environment": {"python": "3.11"},
}


def run(tmp_path, **sections):
    folder = tmp_path / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**RUN, **sections}))
    return str(folder)


def test_a_model_directory_has_the_defaults():
    config = evaluation_config(
        "models/a", [Path("t.jsonl")], OUT, ["evaluation.n_samples=8", "seed=3"]
    )
    assert (config.model.path, config.run_dir, config.seed, config.evaluation.n_samples) == (
        "models/a",
        "out",
        3,
        8,
    )
    assert config.rollout.engine == "embedded" and config.data.eval_prompts == "t.jsonl"


def test_a_run_gives_data_sampling_and_servers_of_its_own(tmp_path):
    config = evaluation_config(
        run(tmp_path), [], OUT, server_args={"sglang": ["--device", "cpu"], "vllm": ["--no"]}
    )
    assert (config.seed, config.rollout.max_response_length, config.evaluation.temperature) == (
        5,
        99,
        0.5,
    )
    assert config.data.task.name == "spell_backward" and config.model.dtype == "float32"
    # servers are started: those of the run may hold other weights
    assert (config.sglang.urls, config.sglang.num_servers, config.sglang.request_timeout) == (
        (),
        1,
        5.0,
    )
    assert config.sglang.server_args == ("--device", "cpu") and not config.sglang.colocated
    assert config.rollout.max_staleness == 0 and config.parallel.tensor_model_parallel_size == 1


def test_tasks_replace_the_runs_own(tmp_path):
    config = evaluation_config(run(tmp_path), [Path("t.jsonl")], OUT)
    assert (config.data.task, config.data.prompts, config.data.max_prompt_length) == (
        None,
        "t.jsonl",
        32,
    )
    assert config.data.resolved_verifier == "exact_match"  # reasoning_gym is of the run's task
    with_own_verifier = evaluation_config(
        run(tmp_path / "b", data={"prompts": "p", "verifier": "a.py:f"}), [Path("t.jsonl")], OUT
    )
    assert with_own_verifier.data.resolved_verifier == "a.py:f"


def test_the_verifier_of_held_out_responses_is_the_runs_or_the_users(tmp_path):
    evaluation = {"verifier": "exact_match", "verifier_options": {"style": "boxed"}}
    folder = run(tmp_path, evaluation=evaluation)

    def scored_by(*overrides, tasks=()):
        data = evaluation_config(folder, tasks, OUT, overrides).evaluation_data
        return data.resolved_verifier, data.verifier_options

    assert scored_by() == ("exact_match", {"style": "boxed"})
    assert scored_by(tasks=[Path("t.jsonl")]) == ("exact_match", {"style": "boxed"})
    assert scored_by("data.verifier=math_verify") == ("math_verify", {})
    assert scored_by("evaluation.verifier=reasoning_gym", "evaluation.verifier_options={}") == (
        "reasoning_gym",
        {},
    )
    of_task = run(tmp_path / "b", evaluation={"verifier": "reasoning_gym"})
    config = evaluation_config(of_task, [Path("t.jsonl")], OUT)
    assert config.evaluation_data.resolved_verifier == "exact_match"


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("embedded", "embedded"), ("sft", "embedded"), ("sglang", "sglang"), ("vllm", "vllm")],
)
def test_the_engine_is_the_runs_or_the_users(tmp_path, engine, expected):
    rollout = {"engine": engine, "rollout_batch_size": 4}
    sections = {"algorithm": {"name": "sft"}} if engine == "sft" else {}
    folder = run(tmp_path, rollout=rollout, **sections)
    assert evaluation_config(folder, [], OUT).rollout.engine == expected
    assert (
        evaluation_config(folder, [], OUT, ["rollout.engine=embedded"]).rollout.engine == "embedded"
    )
    assert evaluation_config(folder, [], OUT, ["rollout.engine=sglang"]).sglang.num_servers == 1


def test_running_servers(tmp_path):
    tasks = [Path("t.jsonl")]
    config = evaluation_config("http://a:1,http://b:1", tasks, OUT, ["model.path=models/a"])
    assert (config.rollout.engine, config.model.path) == ("sglang", "models/a")
    assert (config.sglang.urls, config.sglang.num_servers) == (("http://a:1", "http://b:1"), 0)


def test_keys_and_refusals():
    assert given_keys(["data.verifier=a", "seed=2"]) == {"data.verifier", "seed"}
    with pytest.raises(ConfigError, match="evaluation.pass_at_k"):
        evaluation_config("m", [Path("t")], OUT, ["evaluation.pass_at_k=[4]"])
    with pytest.raises(ConfigError, match="evaluation.n_sample"):
        evaluation_config("m", [Path("t")], OUT, ["evaluation.n_sample=4"])
