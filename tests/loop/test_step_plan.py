"""Mini-batches and the plan of a step."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import PackingRules, plan_micro_batches
from megatron_gspo.data.sample_batch import ROW, BatchTable, SampleBatch
from megatron_gspo.loop.sample_flops import sample_flops
from megatron_gspo.loop.step_plan import PlannedUpdate, StepPlan, mini_batches, plan_step
from tests.loop.episodes import episode
from tests.support.model_shapes import dense_shape
from tests.support.samples import make_sample
from tests.support.training_runs import base_config


def batch_of(lengths: np.ndarray) -> BatchTable:
    """Samples of one row."""
    table = np.zeros(len(lengths), dtype=ROW)
    table["prompt_length"] = 1
    table["response_length"] = lengths - 1
    table["rows"] = 1
    return BatchTable(table)


def test_mini_batches_are_a_partition_drawn_anew_each_step_and_epoch():
    drawn = {
        (seed, step, epoch): mini_batches(50, 16, seed=seed, step=step, epoch=epoch)
        for seed in range(2)
        for step in range(2)
        for epoch in range(2)
    }
    for batches in drawn.values():
        assert [len(row) for row in batches] == [16, 16, 16, 2]
        assert sorted(sum(batches, [])) == list(range(50))
    assert len({str(batches) for batches in drawn.values()}) == len(drawn)
    assert mini_batches(50, 16, seed=1, step=1, epoch=1) == drawn[1, 1, 1]


def test_replicas_stay_through_all_passes_over_the_data():
    lengths = np.random.default_rng(0).integers(5, 40, 32)
    homes = np.arange(32) // 8
    rules = PackingRules(4, 96)
    for epochs in (1, 2):
        config = Config.from_dict(base_config("model", "run", training={"ppo_epochs": epochs}))
        plan = plan_step(batch_of(lengths), homes, config, rules, 3)
        assert len(plan.updates) == 4 * epochs
        assert sorted(i for update in plan.updates for i in update.positions) == sorted(
            list(range(32)) * epochs
        )
        for update in plan.updates:
            assert np.array_equal(update.packing.replica_of(), plan.replica[update.positions])
        assert np.array_equal(plan.first_epoch.replica_of(), plan.replica)
        for replica, batches in enumerate(plan.first_epoch.micro_batches):
            updates = [
                update.packing.within(update.positions).micro_batches[replica]
                for update in plan.updates[:4]
            ]
            assert batches == sum(updates, [])
        assert (plan.repacked > 0.0) == (epochs == 2)
        some = plan.of_samples(batch_of(lengths), [3, 7, 8])
        assert np.array_equal(some.replica_of(), plan.replica[[3, 7, 8]])
        again = plan_step(batch_of(lengths), homes, config, rules, 3)
        assert np.array_equal(again.replica, plan.replica) and again.updates == plan.updates


def test_one_replica_packs_each_pass_by_itself():
    lengths = np.random.default_rng(1).integers(5, 40, 16)
    rules = PackingRules(1, 96)
    plan = plan_step(
        batch_of(lengths), None, Config.from_dict(base_config("model", "run")), rules, 0
    )
    for update in plan.updates:
        assert update.packing == plan_micro_batches(lengths[update.positions], rules)


def test_epochs_of_one_mini_batch_pack_alike():
    lengths = np.random.default_rng(2).integers(5, 40, 16)
    homes = np.arange(16) // 4
    training = {"ppo_epochs": 3, "global_batch_size": 16}
    config = Config.from_dict(base_config("model", "run", training=training))
    for rules in (PackingRules(4, 96), PackingRules(4, 96, same_length=True)):
        plan = plan_step(batch_of(lengths), homes, config, rules, 0)
        assert len(plan.updates) == 3
        assert plan.repacked == 0.0


def test_micro_batches_of_another_length_are_repacked():
    """Pipelines pad a mini-batch to its longest micro-batch."""
    first = PackingRules(1, 10, same_length=True)
    plan = plan_micro_batches(np.array([4, 7]), first)
    longer = replace(plan, seq_length=8, total_multiples=(8, 8))
    updates = [PlannedUpdate([0, 1], packing, 0) for packing in (plan, plan, longer)]
    same = StepPlan(first, np.zeros(2), updates[:2], plan)
    other = replace(same, updates=updates[1:])
    assert (same.repacked, other.repacked) == (0.0, 1.0)


def test_the_cost_of_a_sample_by_hand():
    """A layer has 8 * (8 + 8 + 8) weights in attention and 8 * 18 in its MLP, and 2 heads of 4."""
    shape = dense_shape(num_layers=1000, moe_layers=(False,) * 1000)

    def cost(*rows, scored):
        attention = sum(2 * 2 * (4 + 4) * length * (length + 1) // 2 for length in rows)
        head = 2 * 10 * 8 * scored
        return 2 * (8 * 24 + 8 * 18) * sum(rows) + attention + head // 1000

    branches = make_sample(3, 8, row_lengths=np.array([4, 7]))
    batch = SampleBatch.of([make_sample(2, 5), episode(1.0, 0.0), branches])
    expected = [cost(7, scored=5), cost(6, scored=4), cost(4, 7, scored=8)]
    assert sample_flops(batch, shape).costs.tolist() == pytest.approx(expected, abs=1)


def test_a_step_is_balanced_by_cost_and_keeps_the_branches_of_a_run_together():
    """Of equal tokens, a run of 8 branches costs less than one sequence: two runs meet one."""
    shape = dense_shape(num_layers=100, moe_layers=(False,) * 100, ffn_hidden_size=1, hidden_size=1)
    branches = np.full(8, 125)
    runs = [make_sample(1, 999, row_lengths=branches, sample_index=i) for i in range(4)]
    batch = SampleBatch.of([*runs, make_sample(1, 999), make_sample(1, 999)])
    training = {"global_batch_size": 16}
    config = Config.from_dict(base_config("model", "run", training=training))
    rules = PackingRules(3, 4000)
    by_tokens = plan_step(batch, None, config, rules, 0)
    by_cost = plan_step(batch, None, config, rules, 0, costs=sample_flops(batch, shape).costs)
    assert np.bincount(by_tokens.replica).tolist() == [2, 2, 2]
    assert sorted(by_cost.first_epoch.micro_batches) == [[[0, 1, 2, 3]], [[4]], [[5]]]
    same = by_cost.of_samples(batch, list(range(6)))
    assert same.micro_batches == by_cost.first_epoch.micro_batches
