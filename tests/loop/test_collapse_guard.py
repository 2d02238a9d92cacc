"""The early warning of a collapse: when it counts, and what it says."""

from __future__ import annotations

import pytest

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.loop.collapse_guard import alarm_text, count_low_steps, guard_metrics

GUARD = GuardConfig(effective_sample_size=0.5, mismatch_k3=0.1, steps=3)


def alarms(
    values: list[float | None],
    guard: GuardConfig = GUARD,
    mismatch: list[float | None] | None = None,
) -> list[float | None]:
    """`guard/alarm` by step; None stands for a step without the metric."""
    low = 0
    alarm_by_step = []
    for value, apart in zip(values, mismatch or [None] * len(values), strict=True):
        both = {"effective_sample_size": value, "mismatch/k3": apart}
        metrics = {name: number for name, number in both.items() if number is not None}
        low = count_low_steps(guard, metrics, low)
        alarm_by_step.append(guard_metrics(guard, metrics, low).get("guard/alarm"))
    return alarm_by_step


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4, 0.4, 0.4, 0.4], [0, 0, 1, 1]),
        ([0.4, 0.4, 0.5, 0.4, 0.4, 0.4], [0, 0, 0, 0, 0, 1]),  # the threshold itself is not low
        ([0.4, None, 0.4, 0.4, None], [0, None, 0, 1, None]),  # a step without an update
        ([None, None, None], [None, None, None]),  # supervised
        ([0.4, 0.4, 0.4, 0.6, 0.4], [0, 0, 1, 0, 0]),
    ],
)
def test_so_many_low_steps_in_a_row_make_an_alarm(values, expected):
    assert alarms(values) == expected


@pytest.mark.parametrize(
    ("values", "mismatch", "expected"),
    [
        ([0.9] * 4, [0.2, 0.2, 0.2, 0.1], [0, 0, 1, 0]),  # the threshold itself does not count
        ([None] * 3, [0.2] * 3, [0, 0, 1]),
        ([0.4, 0.9, 0.4], [0.0, 0.2, 0.0], [0, 0, 1]),  # either counts
        ([0.4, None, 0.4], [0.0, 0.0, 0.0], [0, 0, 0]),
    ],
)
def test_engines_that_are_apart_count_too(values, mismatch, expected):
    assert alarms(values, mismatch=mismatch) == expected


def test_one_step_may_be_enough_and_off_measures_nothing():
    assert alarms([0.6, 0.4], GuardConfig(effective_sample_size=0.5, steps=1)) == [0, 1]
    assert alarms([0.1] * 4, GuardConfig(action="off")) == [None] * 4


@pytest.mark.parametrize(
    ("algorithm", "threshold"),
    [
        ({"name": "grpo"}, 0.5),
        ({"name": "gspo"}, 0.5),
        # A weight per sequence leaves token ratios as they are.
        ({"name": "grpo", "rollout_is": "geometric"}, 0.5),
        ({"name": "grpo", "rollout_rs": "token"}, 0.5),
        ({"name": "grpo", "rollout_correction_preset": "token_tis"}, None),
        ({"name": "grpo", "dual_clip": 3.0}, None),
        *[({"name": name}, None) for name in ("cispo", "sapo", "dppo_tv", "dppo_kl", "minirl")],
    ],
)
def test_ratios_of_bounded_weights_do_not_count(algorithm, threshold):
    section = AlgorithmConfig.preset(**algorithm)
    guard = GuardConfig(steps=1).for_algorithm(section)
    assert guard.effective_sample_size == threshold
    assert alarms([0.1], guard) == [threshold is not None]
    # Engines that are apart count for every objective.
    assert alarms([0.1], guard, mismatch=[0.2]) == [1]
    given = GuardConfig(effective_sample_size=0.3, steps=1)
    assert given.for_algorithm(section) == given


def test_the_line_says_what_is_low_and_what_to_try():
    low = {"effective_sample_size": 0.1234}
    assert (
        alarm_text(GUARD, 12, low | {"mismatch/k3": 0.1})
        == "step 12: effective_sample_size = 0.12 is below 0.5 for the last 3 steps, which"
        " announces a collapse; try routing.replay: r3, algorithm.name: gspo or a smaller"
        " optimizer.lr"
    )
    assert "below 0.5 for this step, " in alarm_text(
        GuardConfig(effective_sample_size=0.5, steps=1), 1, low
    )
    apart = {"effective_sample_size": 0.9, "mismatch/k3": 0.25}
    assert (
        alarm_text(GUARD, 12, apart)
        == "step 12: mismatch/k3 = 0.25 is above 0.1 for the last 3 steps, which announces a"
        " collapse; try routing.replay: r3 or engines with the trainer's dtype"
    )
    both = alarm_text(GUARD, 12, apart | low)
    assert "0.12 is below 0.5 and mismatch/k3 = 0.25 is above 0.1 for" in both and "gspo" in both
