"""The result does not depend on how a mini-batch is cut: into micro-batches, or over context ranks."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.algorithms import PRESETS, finish_metrics, policy_loss, preset

from .reference import random_batch

DRIFT = {name: 5e-4 if name.startswith("gspo") else 0.2 for name in PRESETS}


def objective_of(name):
    return preset(name, kl_loss_coef=0.05, entropy_coef=0.01)


def run(name, batch, whole, sum_over_context=None, dtype=torch.float64):
    arguments = batch.arguments(dtype)
    loss, metrics = policy_loss(
        objective_of(name),
        **arguments,
        num_sequences=whole.num_sequences,
        num_tokens=whole.num_tokens,
        sum_over_context=sum_over_context,
    )
    loss.backward()
    return loss.detach(), arguments["log_probs"].grad, metrics


def add_up(parts):
    names = parts[0].keys()
    reduce = {"_max": torch.amax, "_min": torch.amin}
    return {n: reduce.get(n[-4:], torch.sum)(torch.stack([p[n] for p in parts]), dim=0) for n in names}


def assert_same(parts, positions, whole):
    """`parts`: (loss, grad, metrics) of each; `positions`: where each one's tokens lie in the whole."""
    loss, grad, metrics = whole
    torch.testing.assert_close(sum(p[0] for p in parts), loss, rtol=1e-11, atol=1e-13)
    gathered = torch.full_like(grad, float("nan"))
    for (_, part, _), where in zip(parts, positions, strict=True):
        gathered[where] = part
    torch.testing.assert_close(gathered, grad, rtol=1e-11, atol=1e-14)
    got, expected = finish_metrics(add_up([p[2] for p in parts])), finish_metrics(metrics)
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)


def in_context_shards(batch, owner, ranks, name, dtype=torch.float64):
    """Run each rank with the sums that the others would bring: one pass to collect, one with the totals."""
    positions = [(owner == r).nonzero().flatten() for r in range(ranks)]
    shards = [batch.take(where) for where in positions]
    contributions = []
    for shard in shards:
        run(name, shard, batch, lambda x: contributions.append(x) or x)
    assert len(contributions) == ranks  # exactly one collective each
    assert {tuple(x.shape) for x in contributions} == {(2, batch.num_segments)}
    assert not any(x.requires_grad for x in contributions)
    total = torch.stack(contributions).sum(0)
    return [run(name, shard, batch, lambda x: total, dtype) for shard in shards], positions


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches(name, per_token):
    batch = random_batch(5, drift=DRIFT[name], per_token=per_token)
    whole = run(name, batch, batch)
    for groups in (
        [[0, 1, 2], [3, 4, 5, 6], [7, 8]],
        [[i] for i in range(9)],
        [[8, 0, 3], [2], [7, 1, 4, 5, 6]],
    ):
        parts, positions = [], []
        for group in groups:
            where = torch.cat([(batch.segment_ids == i).nonzero().flatten() for i in group])
            cut = batch.take(where)
            renumber = torch.full((9,), -1)
            renumber[torch.tensor(group)] = torch.arange(len(group))
            cut = type(cut)(
                **{**vars(cut), "segment_ids": renumber[cut.segment_ids], "num_segments": len(group)}
            )
            parts.append(run(name, cut, batch))
            positions.append(where)
        assert_same(parts, positions, whole)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_context_parallel_shards(name, ranks):
    """Tokens dealt out at random: ranks that hold none of a sequence, or only untrained tokens of it,
    occur.
    """
    batch = random_batch(6, drift=DRIFT[name], per_token=name != "gspo")
    owner = torch.randint(0, ranks, batch.segment_ids.shape, generator=torch.Generator().manual_seed(1))
    parts, positions = in_context_shards(batch, owner, ranks, name)
    assert_same(parts, positions, run(name, batch, batch))


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_a_context_rank_with_nothing_trained(name):
    batch = random_batch(6, drift=DRIFT[name])
    owner = (batch.loss_mask == 0).long()
    parts, positions = in_context_shards(batch, owner, 2, name)
    assert parts[1][0] == 0 and parts[1][1].abs().max() == 0
    assert_same(parts, positions, run(name, batch, batch))


def test_float32_ratio_is_the_same_on_every_context_rank():
    batch = random_batch(6, drift=5e-4)
    owner = torch.arange(batch.segment_ids.numel()) % 2
    parts, _ = in_context_shards(batch, owner, 2, "gspo", torch.float32)
    _, _, whole = run("gspo", batch, batch, dtype=torch.float32)
    merged = add_up([p[2] for p in parts])
    assert merged["ratio_max"] == whole["ratio_max"] and merged["ratio_min"] == whole["ratio_min"]


def test_a_local_mean_would_be_noticed():
    """The split matters: without the other ranks' sums the GSPO ratio of a shard is another one."""
    batch = random_batch(6, drift=5e-4)
    owner = torch.arange(batch.segment_ids.numel()) % 2
    wrong = [run("gspo", batch.take((owner == r).nonzero().flatten()), batch) for r in range(2)]
    assert abs(sum(w[0] for w in wrong) - run("gspo", batch, batch)[0]) > 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_one_collective_with_and_without_trained_tokens(name):
    for mask in (1.0, 0.0):
        calls = []
        ones = torch.full((4,), -1.0)
        loss, metrics = policy_loss(
            preset(name),
            log_probs=ones.clone().requires_grad_(),
            old_log_probs=ones,
            advantages=ones,
            loss_mask=torch.full((4,), mask),
            segment_ids=torch.tensor([0, 0, 1, 1]),
            num_sequences=2,
            num_segments=2,
            sum_over_context=lambda x: calls.append(x.shape) or x,  # noqa: B023
        )
        loss.backward()
        assert calls == [(2, 2)]
        assert loss.isfinite() and not any(v.isnan() for v in metrics.values())


class NoHostRead(TorchDispatchMode):
    """Fails on operations that wait for the device: reading a scalar, or shapes that depend on data."""

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
        for num_tokens in (counts[1], None, torch.tensor(counts[1])):
            loss, _ = policy_loss(
                objective_of(name), **arguments, num_sequences=counts[0], num_tokens=num_tokens
            )
            loss.backward()
    with NoHostRead(), pytest.raises(AssertionError):  # the mode sees what it is there to see
        policy_loss(objective_of(name), **{**arguments, "num_segments": None}, num_sequences=counts[0])
