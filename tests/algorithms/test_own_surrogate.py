"""A surrogate of the user's own, by path or as a function: the example against its formula in
float64, and what is refused before a run begins.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gspo.algorithms import Objective, check_surrogate, finish_metrics
from megatron_gspo.user_code import UserCodeError, load_function

from .reference import TAPERED, naive_loss, naive_metrics, random_batch
from .splits import evaluate


@pytest.mark.parametrize("seed", range(5))
def test_the_example_in_float64(seed):
    batch = random_batch(seed, drift=0.3)
    check_surrogate(TAPERED)
    outcome = evaluate(TAPERED, batch)
    leaf = batch.log_probs.clone().requires_grad_()
    expected = naive_loss(TAPERED, batch, leaf, batch.entropy)
    expected.backward()
    torch.testing.assert_close(outcome.loss, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(outcome.grad, leaf.grad, rtol=1e-10, atol=1e-14)
    metrics = finish_metrics(outcome.metrics)
    for name, value in naive_metrics(TAPERED, batch).items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def objective(surrogate, **fields) -> Objective:
    return Objective("mine", "token", "token-mean", surrogate=surrogate, **fields)


def test_a_function_and_its_options():
    tapered = load_function(TAPERED.surrogate, "surrogate", UserCodeError)
    batch = random_batch(0, drift=0.3)
    by_path = evaluate(TAPERED, batch)
    by_function = evaluate(objective(tapered, surrogate_options={"largest": 1.0}), batch)
    assert torch.equal(by_path.loss, by_function.loss)
    other = evaluate(objective(tapered, surrogate_options={"largest": 0.5}), batch)
    assert not torch.equal(by_path.loss, other.loss)


SOURCE = """
import torch

def ratio_alone(objective, terms):
    return terms.ratio * terms.advantages

def by_sequence(objective, terms):
    return torch.zeros(2) * terms.ratio.sum()

def number(objective, terms):
    return 1.0

def infinite(objective, terms):
    return terms.ratio / 0

def detached(objective, terms):
    return terms.ratio.detach()

def three(objective, ratio, advantages):
    return ratio * advantages
"""


def test_a_tensor_alone_clips_nothing(tmp_path: Path):
    (tmp_path / "mine.py").write_text(SOURCE)
    own_surrogate = objective(f"{tmp_path}/mine.py:ratio_alone")
    check_surrogate(own_surrogate)
    metrics = finish_metrics(evaluate(own_surrogate, random_batch(0, drift=0.3)).metrics)
    assert metrics["clip_fraction/tokens"] == 0 and metrics["ratio/mean"] != 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("by_sequence", "returned [2] for 4 tokens; return what is to be maximised"),
        ("number", "returned float for 4 tokens"),
        ("infinite", "its value or gradient is not finite"),
        ("detached", "it raised RuntimeError: element 0 of tensors does not require grad"),
        ("three", "called with (objective, terms) of 4 tokens, it raised TypeError"),
        ("absent", "has no 'absent'; define it or correct the name"),
    ],
)
def test_what_a_run_refuses_at_its_start(tmp_path: Path, function: str, words: str):
    (tmp_path / "mine.py").write_text(SOURCE)
    path = f"{tmp_path}/mine.py:{function}"
    with pytest.raises(UserCodeError) as error:
        check_surrogate(objective(path))
    message = str(error.value)
    assert message.startswith(f"algorithm.surrogate = '{path}': ") and words in message
    assert "\n" not in message


def test_options_are_those_of_the_function(tmp_path: Path):
    with pytest.raises(UserCodeError, match="unexpected keyword argument 'width'"):
        check_surrogate(objective(TAPERED.surrogate, surrogate_options={"width": 1}))
    with pytest.raises(ValueError, match=r"surrogate_options = .* has no effect with"):
        objective("clip", epsilon_low=0.2, epsilon_high=0.2, surrogate_options={"width": 1})
