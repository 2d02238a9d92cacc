"""Engines that violate their protocol, and responses without a trained token: named, or counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.data.sample import Sample
from tests.support.command_line import Case, Outcome, check, small_config, start, with_engine
from tests.support.model_server import ModelServer, tied_model
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse
from tests.support.training_runs import records


def answer(prompt: Any, number: int, seed: int) -> ScriptedResponse:
    """Six tokens, other ones for each sample, so that rewards differ."""
    return ScriptedResponse([5 + number, 6, 7, 8, 1], [-1.0] * 5, text="x" * number)


@dataclass
class MyEngine(ScriptedEngine):
    """Answers properly, and then ``breaks`` the samples."""

    script: Any = answer
    breaks: Callable[[list[Sample]], Any] = field(default=lambda samples: samples)

    def generate(self, prompts, sampling, *, seed):
        return self.breaks(super().generate(prompts, sampling, seed=seed))


def second(**changes):
    """The second sample with other fields; a function makes the new value of the old."""

    def change(samples):
        old = samples[1]
        new = {
            name: value(getattr(old, name)) if callable(value) else value
            for name, value in changes.items()
        }
        return [samples[0], replace(old, **new), *samples[2:]]

    return change


def every(**changes):
    return lambda samples: [replace(sample, **changes) for sample in samples]


def fails(error):
    def raise_it(samples):
        raise error

    return raise_it


def put(place, value):
    def change(array):
        array = array.copy()
        array[place] = value
        return array

    return change


def failure(name: str, phrase: str, breaks: Any, *shows: str) -> tuple[Case, Any]:
    return Case(name, phrase, shows=shows, code=1), breaks


BROKEN = (
    failure(
        "too few samples",
        "samples for 2 prompts x 4; give 8",
        lambda samples: samples[:-1],
        "gave 7",
    ),
    failure(
        "positive log-prob",
        "a log-probability is at most 0",
        second(rollout_log_probs=put(2, 0.5)),
        "has 0.5",
    ),
    failure(
        "token outside the vocabulary",
        "the model's vocabulary ends at",
        second(tokens=put(-1, 10**6)),
        "tokens has the id 1000000",
    ),
    failure("another prompt", "does not begin with the prompt's", second(tokens=put(0, 3))),
    failure(
        "engine that refuses",
        "the engine MyEngine failed: ",
        fails(ValueError("prompt 3 is cursed")),
        "ValueError: prompt 3 is cursed",
    ),
)
CASES = tuple(case for case, _ in BROKEN)


def run(
    breaks: Any, model: str, tmp_path: Any, **sections: Any
) -> tuple[Outcome, dict[str, Any] | None]:
    """The outcome and the record of the one step, where it was made."""
    config = small_config(model, tmp_path, **sections)
    done = with_engine(config, MyEngine(breaks=breaks))
    metrics = records(config["run_dir"]) if done.code == 0 else []
    return done, metrics[-1] if metrics else None


@pytest.mark.parametrize(("case", "breaks"), BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_a_broken_promise_is_named(case, breaks, model, tmp_path):
    check(case, run(breaks, model, tmp_path)[0])


def test_an_engine_with_a_defect_keeps_its_traceback(model, tmp_path):
    done, _ = run(fails(KeyError("state")), model, tmp_path)
    assert done.code == 1 and "Traceback" in done.text
    assert done.messages == ["error: KeyError: 'state' (the traceback is in its log)"]


def test_no_log_probs_where_they_are_the_old_ones(model, tmp_path):
    done, _ = run(
        every(rollout_log_probs=None), model, tmp_path, algorithm={"old_log_probs": "rollout"}
    )
    phrase = (
        'algorithm.old_log_probs = "rollout": the engine gives no log-probs; set it to recompute'
    )
    check(Case("old log-probs that aren't there", phrase), done)


def test_all_rewards_equal_is_said_and_changes_no_weight_by_the_objective(model, tmp_path):
    done, row = run(every(text="xx"), model, tmp_path)
    assert done.code == 0 and "step 1: the rewards of every group are all equal" in done.text
    assert row["groups/zero_variance"] == 1.0 and row["loss"] == 0.0 and row["grad_norm"] == 0.0


def test_all_aborted_is_skipped_and_counted(model, tmp_path):
    done, row = run(every(finish_reason="abort"), model, tmp_path)
    assert done.code == 0
    assert "step 1: every response is masked, so nothing was updated" in done.text
    assert row["masked/truncated"] == 8 and row["updates"] == 0 and row["updates/skipped"] == 1


def test_a_response_of_no_token_is_counted(model, tmp_path):
    """Its reward still counts in its group: it is what the policy answered."""

    def empty(samples: list[Sample]) -> list[Sample]:
        none = samples[1]
        start = none.tokens[: none.prompt_length]
        nothing = {"loss_mask": np.zeros(0, bool), "rollout_log_probs": np.zeros(0, np.float32)}
        return [samples[0], replace(none, tokens=start, **nothing), *samples[2:]]

    done, row = run(empty, model, tmp_path)
    assert done.code == 0 and row["masked/empty"] == 1 and row["updates"] == 1
    assert np.isfinite(row["loss"])


def broken_weights(config: dict[str, Any], lr: float) -> dict[str, Any]:
    """A learning rate that the first update of two doesn't survive."""
    config["training"]["steps"] = 2
    config["optimizer"] = {"lr": lr, "clip_grad": 0}
    return config


DIVERGED = (
    Case(
        "weights that diverged",
        "so its weights are broken; look at grad_norm before",
        code=1,
        shows=("step 2: no response has finite log-probs", "lower optimizer.lr"),
    ),
    Case(
        "gradient that isn't finite",
        "so the weights were not updated; lower optimizer.lr",
        code=1,
        shows=("step 2: the gradient is not finite",),
    ),
)


@pytest.mark.parametrize(
    ("case", "lr"), zip(DIVERGED, (1e38, 1e30), strict=True), ids=lambda v: getattr(v, "name", "")
)
def test_a_run_that_diverged_ends(case, lr, model, tmp_path):
    config = broken_weights(small_config(model, tmp_path), lr)
    check(case, with_engine(config, MyEngine()))


OTHER_MODEL = Case(
    "server of another model",
    "computes another model than the trainer",
    code=1,
    shows=(
        "error: weights 0: server http://127.0.0.1",
        "SGLang ignores tie_word_embeddings of qwen3_moe",
    ),
)


def test_a_server_that_computes_another_model(tmp_path):
    """With an output layer of its own, in place of the embeddings; found before the first
    response.
    """
    model = tied_model(tmp_path / "model", tied=True)
    with ModelServer(model, ignores_ties=True) as server:
        sglang = {"urls": [server.url], "weight_transport": "disk"}
        check(
            OTHER_MODEL,
            start(
                small_config(model, tmp_path, rollout={"engine": "sglang"}, sglang=sglang), tmp_path
            ),
        )
