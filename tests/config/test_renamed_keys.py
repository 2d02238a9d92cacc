"""Every old key and value is refused with the new name, and old data can be upgraded."""

from __future__ import annotations

import copy

import pytest

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.fields import keys
from megatron_gspo.config.renamed_keys import RENAMED_KEYS, refuse_old_keys, upgrade_old_keys

VALUES = {
    "algorithm.aggregation": ("token_mean", "token-mean"),
    "algorithm.zero_variance_groups": ("refill", True),
    "algorithm.max_refills": (3, 4),
    "rollout.engine": ("demonstrations", "sft"),
    "algorithm.rollout_is": ("sequence", "geometric"),
    "algorithm.rollout_rs": ("sequence", "geometric"),
    "algorithm.rollout_correction": ("sequence", "geometric"),
    "algorithm.rollout_mask": ("sequence", "geometric"),
}


def old_data(key: str, value: object) -> dict:
    section, _, leaf = key.partition(".")
    return {section: {leaf: value}}


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_is_an_error_that_names_the_new_one(old: str) -> None:
    value, new = VALUES.get(old, (7, 7))
    with pytest.raises(ConfigError) as caught:
        refuse_old_keys(old_data(old, value))
    shown = str(new).lower() if isinstance(new, bool) else new
    assert str(caught.value).endswith(f"; write {RENAMED_KEYS[old].new}: {shown}")
    assert str(caught.value).startswith(f"{old} = ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_is_upgraded(old: str) -> None:
    value, new = VALUES.get(old, (7, 7))
    data = old_data(old, value)
    before = copy.deepcopy(data)
    assert upgrade_old_keys(data) == old_data(RENAMED_KEYS[old].new, new)
    assert data == before


def test_the_new_names_are_keys_and_the_old_ones_are_not() -> None:
    known = {key.name for key in keys(Config)}
    assert {row.new for row in RENAMED_KEYS.values()} <= known
    assert {old for old, row in RENAMED_KEYS.items() if old != row.new}.isdisjoint(known)


@pytest.mark.parametrize(
    "old, new",
    [("sequence_mean", "seq-mean-token-mean"), ("token_mean", "token-mean"), ("constant", "seq-mean-token-sum-norm")],
)
def test_values_of_the_aggregation(old: str, new: str) -> None:
    assert upgrade_old_keys({"algorithm": {"aggregation": old}}) == {"algorithm": {"loss_agg_mode": new}}


@pytest.mark.parametrize("key", ["rollout_is", "rollout_rs"])
def test_sequence_is_refused_with_both_of_its_meanings(key: str) -> None:
    with pytest.raises(ConfigError, match=r"product of .* \(verl, TRL\).* geometric mean; write .*: geometric$"):
        refuse_old_keys({"algorithm": {key: "sequence"}})
    refuse_old_keys({"algorithm": {key: "token"}})


def test_new_data_is_unchanged(plain: dict) -> None:
    config = Config.from_dict(plain)
    refuse_old_keys(config.dump())
    assert upgrade_old_keys(config.dump()) == config.dump()


def test_an_old_dr_grpo_keeps_its_divisor(plain: dict) -> None:
    plain["algorithm"] = {"name": "dr_grpo", "constant_length": None, "zero_variance_groups": "keep"}
    config = Config.from_dict(upgrade_old_keys(plain))
    assert config.algorithm.loss_scale_factor == 1024 and not config.algorithm.dynamic_sampling


def test_nulls_and_odd_data_pass() -> None:
    assert upgrade_old_keys({"algorithm": None, "seed": 3}) == {"algorithm": None, "seed": 3}
    assert upgrade_old_keys({"rollout": {"engine": ["x"]}}) == {"rollout": {"engine": ["x"]}}
    assert upgrade_old_keys({"algorithm": {"max_refills": None}}) == {"algorithm": {"max_num_gen_batches": None}}
