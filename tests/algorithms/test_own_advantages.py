"""An advantage estimator of the user's own: the example by hand, and what is refused before a run
begins.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gspo.algorithms import (
    Objective,
    ResponseTerms,
    check_advantages,
    group_advantages,
    preset,
    response_advantages,
)
from megatron_gspo.user_code import UserCodeError

EXAMPLE = f"{Path(__file__).parents[2]}/examples/own_code/advantages.py:largest_deviation"
TERMS = ResponseTerms(
    rewards=torch.tensor([1.0, 0.0, 0.5, 0.5, 4.0, 0.0, 2.0], dtype=torch.float64),
    group_ids=torch.tensor([3, 3, 1, 1, 2, 2, 2]),
    lengths=torch.tensor([5, 3, 4, 4, 2, 2, 2]),
    truncated=torch.tensor([False, False, False, False, True, False, False]),
)


def objective(estimator, **options) -> Objective:
    return Objective(
        "mine",
        "token",
        "token-mean",
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantage_estimator=estimator,
        advantage_options=options,
    )


def test_the_example_by_hand():
    check_advantages(objective(EXAMPLE))
    values = response_advantages(objective(EXAMPLE), TERMS)
    assert values.tolist() == [1, -1, 0, 0, 1, -1, 0] and values.dtype == torch.float32
    halved = response_advantages(objective(EXAMPLE, truncated=0.5), TERMS)
    assert halved.tolist() == [1, -1, 0, 0, 0.5, -1, 0]


def test_a_function_itself_and_the_group():
    by_function = response_advantages(
        objective(lambda objective, terms: terms.rewards - objective.epsilon_low), TERMS
    )
    torch.testing.assert_close(by_function, (TERMS.rewards - 0.2).float())
    expected = group_advantages(TERMS.rewards, TERMS.group_ids, std="none")
    group = preset("dr_grpo", loss_scale_factor=9)
    assert torch.equal(response_advantages(group, TERMS), expected)


SOURCE = """
import torch

def scalar(objective, terms):
    return terms.rewards.mean()

def words(objective, terms):
    return "1"

def divided(objective, terms):
    return terms.rewards / 0

def three(objective, rewards, groups):
    return rewards
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("scalar", "returned [] for 4 responses; return a tensor [N]"),
        ("words", "returned str for 4 responses"),
        ("divided", "returned NaN or infinity for finite rewards"),
        ("three", "called with (objective, terms) of 4 responses, it raised TypeError"),
        ("absent", "has no 'absent'; define it or correct the name"),
    ],
)
def test_what_a_run_refuses_at_its_start(tmp_path: Path, function: str, words: str):
    (tmp_path / "mine.py").write_text(SOURCE)
    path = f"{tmp_path}/mine.py:{function}"
    with pytest.raises(UserCodeError) as error:
        check_advantages(objective(path))
    message = str(error.value)
    assert message.startswith(f"algorithm.advantage_estimator = '{path}': ") and words in message
    assert "\n" not in message


def test_names_and_options_that_mean_nothing():
    with pytest.raises(ValueError, match="advantage_estimator = 'critic': must be one of group, g"):
        objective("critic")
    with pytest.raises(ValueError, match=r"advantage_options = {'a': 1} has no effect with"):
        objective("group", a=1)
    with pytest.raises(ValueError, match="is not gspo: use 'group', another name"):
        preset("gspo", advantage_estimator=EXAMPLE)
