"""Corners of cutting a mini-batch, and what a call costs: one collective, no wait for the device.

That any cut gives the same result is in tests/properties.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.algorithms import PRESETS

from .reference import call_policy_loss, complete_preset, drift_of, random_batch
from .splits import add_up, evaluate, evaluate_on_ranks

DRIFT = {name: drift_of(name) for name in PRESETS}


def objective_of(name):
    return complete_preset(name, kl_loss_coef=0.05, entropy_coef=0.01)


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_a_context_rank_with_nothing_trained(name):
    batch = random_batch(6, drift=DRIFT[name])
    owner = (batch.loss_mask == 0).long()
    trained, untrained = evaluate_on_ranks(objective_of(name), batch, batch, owner, 2)
    assert untrained.loss == 0 and untrained.grad.abs().max() == 0
    torch.testing.assert_close(trained.loss, evaluate(objective_of(name), batch).loss)


def test_float32_ratio_is_the_same_on_every_context_rank():
    batch = random_batch(6, drift=5e-4)
    owner = torch.arange(batch.segment_ids.numel()) % 2
    parts = evaluate_on_ranks(objective_of("gspo"), batch, batch, owner, 2, torch.float32)
    whole = evaluate(objective_of("gspo"), batch, dtype=torch.float32).metrics
    merged = add_up([p.metrics for p in parts])
    assert merged["ratio_max"] == whole["ratio_max"] and merged["ratio_min"] == whole["ratio_min"]


def test_a_local_mean_would_be_noticed():
    """The split matters: without the other ranks' sums the GSPO ratio of a shard is another one."""
    batch = random_batch(6, drift=5e-4)
    owner = torch.arange(batch.segment_ids.numel()) % 2
    gspo = objective_of("gspo")
    wrong = [evaluate(gspo, batch.take((owner == r).nonzero().flatten()), batch) for r in range(2)]
    assert abs(sum(w.loss for w in wrong) - evaluate(gspo, batch).loss) > 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_one_collective_with_and_without_trained_tokens(name):
    for mask in (1.0, 0.0):
        calls = []
        ones = torch.full((4,), -1.0)
        loss, metrics = call_policy_loss(
            complete_preset(name),
            log_probs=ones.clone().requires_grad_(),
            old_log_probs=ones,
            advantages=ones,
            loss_mask=torch.full((4,), mask),
            segment_ids=torch.tensor([0, 0, 1, 1]),
            num_sequences=2,
            num_tokens=4,
            num_segments=2,
            sum_over_context=lambda x: calls.append(x.shape) or x,  # noqa: B023
        )
        loss.backward()
        [(rows, sequences)] = calls
        assert sequences == 2 and rows <= 4
        assert loss.isfinite() and not any(v.isnan() for v in metrics.values())


class NoHostRead(TorchDispatchMode):
    """Fails on operations that wait for the device: reading a scalar, or shapes that depend on
    data.
    """

    READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.READS:
            raise AssertionError(f"{func} waits for the device")
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
            if any(i is not None and i.dtype == torch.bool for i in args[1]):
                raise AssertionError(f"{func} with a bool index waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRESETS)
def test_no_device_synchronisation(name):
    batch = random_batch(7, drift=DRIFT[name])
    counts = batch.num_sequences, batch.num_tokens
    arguments = batch.arguments(torch.float32)
    with NoHostRead():
        unknown = () if PRESETS[name]["loss_agg_mode"] == "token-mean" else (None,)
        for num_tokens in (counts[1], torch.tensor(counts[1]), *unknown):
            loss, _ = call_policy_loss(
                objective_of(name), **arguments, num_sequences=counts[0], num_tokens=num_tokens
            )
            loss.backward()
    with NoHostRead(), pytest.raises(AssertionError):  # the mode detects a read
        nothing = {**arguments, "num_segments": None}
        call_policy_loss(
            objective_of(name), **nothing, num_sequences=counts[0], num_tokens=counts[1]
        )
