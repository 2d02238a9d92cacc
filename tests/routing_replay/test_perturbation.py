"""A perturbation of the routers' choice: the example, and what is refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gspo.config import RoutingConfig
from megatron_gspo.routing_replay.perturbation import (
    PerturbedPass,
    RoutedTokens,
    load_perturbation,
)
from megatron_gspo.user_code import UserCodeError

EXAMPLE = f"{Path(__file__).parents[2]}/examples/own_code/perturbation.py:rounded"
LOGITS = torch.tensor([[1.0, 1.0 + 2**-9, -2.0], [0.5, 0.25, 3.0]])
TOKENS = RoutedTokens(torch.tensor([4, 4]), torch.tensor([0, 0]), torch.tensor([2, 3]))


def load(path: str, **options):
    return load_perturbation(RoutingConfig(perturbation=path, perturbation_options=options))


def test_the_example():
    """Logits that are equal in bfloat16 are equal in the rollout engine alone."""
    perturbation = load(EXAMPLE)
    rollout = PerturbedPass(perturbation, "rollout", seed=1)
    trainer = PerturbedPass(perturbation, "trainer", seed=1, step=2, phase="update 0")
    chosen_by, weighed_by = rollout(LOGITS, 0, TOKENS)
    assert chosen_by[0].tolist() == [1, 1, -2] and weighed_by is LOGITS
    assert trainer(LOGITS, 0, TOKENS) == (LOGITS, LOGITS)
    with perturbation.off():
        assert rollout(LOGITS, 0, TOKENS) == (LOGITS, LOGITS)
    assert rollout(LOGITS, 0, TOKENS)[0] is not LOGITS
    assert load_perturbation(RoutingConfig()) is None


def test_tokens_have_the_names_of_their_sequences():
    sequences = torch.tensor([[7, 1], [5, -1]])
    tokens = RoutedTokens.of(sequences, torch.tensor([1, 0, 0]), torch.tensor([0, 0, 1]))
    assert (tokens.prompts.tolist(), tokens.samples.tolist()) == ([5, 7, 7], [-1, 1, 1])


SOURCE = """
import torch

def number(terms):
    return 1.0

def choices(terms):
    return terms.logits.topk(2).indices

def infinite(terms):
    return terms.logits, terms.logits / 0

def random(terms):
    return terms.logits + torch.rand(terms.logits.shape)

def centred(terms):
    return terms.logits - terms.logits.mean(0)

def two(logits, layer):
    return logits
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "returned float for logits [3, 4]; return logits of that shape"),
        ("choices", "returned [3, 2] for logits [3, 4]"),
        ("infinite", "returned NaN or infinity"),
        ("random", "depend on the other tokens or on the call"),
        ("centred", "depend on the other tokens or on the call"),
        ("two", "called with (terms) of 3 tokens, it raised TypeError"),
        ("absent", "has no 'absent'; define it or correct the name"),
    ],
)
def test_what_a_run_refuses_at_its_start(tmp_path: Path, function: str, words: str):
    (tmp_path / "mine.py").write_text(SOURCE)
    path = f"{tmp_path}/mine.py:{function}"
    with pytest.raises(UserCodeError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"routing.perturbation = '{path}': ") and words in message
    assert "\n" not in message


def test_options_are_those_of_the_function():
    with pytest.raises(UserCodeError, match="unexpected keyword argument 'bits'"):
        load(EXAMPLE, bits=8)
