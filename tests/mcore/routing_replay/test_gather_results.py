"""Expert ids by sample and statistics of a pass, against counts by hand; and unusual models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.routing_replay.gather_results import (
    routing_counts,
    routing_stats,
    shared_experts_of_replica,
)
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.routing_replay.routes import RouteShape
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import all_flips, all_routes, everywhere
from tests.support.routing_cases import (
    distance,
    policy_of,
    scored_samples,
    shape_of,
    train_pass,
    with_random_routes,
)
from tests.support.samples import trained_only
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import load_reference, observe_routers

BATCHING = micro_batches_of(48)


LAYOUTS = {
    "alone": parallel(),
    "dp2": parallel(),
    "tp2 ep2": parallel(tensor=2, expert=2),
    "pp2": parallel(pipeline=2),
    "cp2": parallel(context=2),
}


def scattered(samples: list[Sample], recorded: list[np.ndarray], shape: RouteShape) -> list[Sample]:
    """Routes of which a quarter of all (row, layer) were resampled; an eighth of the rows is
    unknown.
    """
    g = np.random.default_rng(8)
    partly_resampled = []
    for sample, routes in zip(with_random_routes(samples, shape, seed=2), recorded, strict=True):
        changed = g.random(routes.shape[:2]) < 0.25
        routes = np.where(changed[..., None], sample.routed_experts, routes)
        partly_resampled.append(
            replace(sample, routed_experts=routes, missing_routes=g.random(len(routes)) < 0.125)
        )
    return partly_resampled


def count(samples: list[Sample], used: list[np.ndarray], experts: int) -> dict[str, Any]:
    """Token by token: how far ``used`` is from the samples' own routes, and which experts got
    how much.
    """
    layers = used[0].shape[1]
    trained = compared = flipped = 0
    rate = np.zeros(layers)
    load = np.zeros((layers, experts))
    for sample, routes in zip(samples, used, strict=True):
        for j in range(sample.response_length):
            row = sample.prompt_length + j - 1
            if not sample.loss_mask[j]:
                continue
            trained += 1
            for layer in range(layers):
                for expert in routes[row, layer].tolist():
                    load[layer, expert] += 1
            if sample.missing_routes[row]:
                continue
            compared += 1
            pairs = zip(routes[row].tolist(), sample.routed_experts[row].tolist(), strict=True)
            shares = [len(set(a) - set(b)) / len(a) for a, b in pairs]
            rate += shares
            flipped += any(shares)
    return {
        "rate": rate / compared,
        "flipped": flipped / compared,
        "compared": compared,
        "load": load / load.sum(1, keepdims=True),
        "trained": trained,
    }


def flips_of(sample: Sample, used: np.ndarray) -> list[int]:
    """Of each response token, one by one: 1 or 0, and -1 where nothing was compared."""
    flips = []
    for j in range(sample.response_length):
        row = sample.prompt_length - 1 + j
        is_missing = sample.missing_routes is not None and sample.missing_routes[row]
        layers = zip(used[row].tolist(), sample.routed_experts[row].tolist(), strict=True)
        flips.append(
            -1
            if is_missing or not sample.loss_mask[j]
            else int(any(set(a) != set(b) for a, b in layers))
        )
    return flips


def shares_of(sample: Sample, used: np.ndarray, layers: list[int]) -> list[list[float]]:
    """Of each row, one by one: the share of the used experts in its own given row, the next one and
    the previous one; -1 where one of the two is unknown or absent."""
    shares = []
    for row in range(len(used)):
        values = []
        for other in (row, row + 1, row - 1):
            two_rows = (row, other)
            if not 0 <= other < len(used) or sample.missing_routes[list(two_rows)].any():
                values.append(-1.0)
                continue
            given = sample.routed_experts[other]
            values.append(
                np.mean(
                    [len(set(used[row, i].tolist()) & set(given[i].tolist())) / 2 for i in layers]
                )
            )
        shares.append(values)
    return shares


def check_shares(
    done: list[MicroBatchRoutes], given: list[Sample], used: list[np.ndarray], parts: int
) -> None:
    """With ``parts`` of a sequence on other ranks some neighbours are not seen."""
    inputs = TrainingBatch.of(given).inputs
    shares = inputs.split(shared_experts_of_replica(done, TrainingBatch.of(given)))
    layers = sorted(done[0].layers)
    seen = 0
    expected_seen = 0
    sample_ids = [row.sample for routes in done for row in routes.layout.rows]
    for i in sample_ids:
        assert len(shares[i]) == given[i].length and np.isnan(shares[i][-1]).all()
        rounded = np.nan_to_num(shares[i][:-1], nan=-1.0)
        expected = np.array(shares_of(given[i], used[i], layers))
        compared = rounded >= 0
        assert np.abs(rounded - expected)[compared].max() < 1e-9 and (expected[compared] >= 0).all()
        assert (compared[:, 0] == (expected[:, 0] >= 0)).all(), "the own row is always seen"
        seen += compared.sum()
        expected_seen += (expected >= 0).sum()
    assert seen == expected_seen if parts == 1 else 0.6 * expected_seen < seen < expected_seen


def compare_with_counts(rank: int, world_size: int, path: str, layout: ParallelConfig) -> None:
    policy = policy_of(path, layout)
    shape = shape_of(policy)
    samples = scored_samples(8)
    record = ReplayOptions(shape, record=True)
    first = compute_log_probs(
        policy, TrainingBatch.of(samples), BATCHING, temperature=1.0, routing=record
    ).routing
    given = scattered(samples, all_routes(first, samples, range(len(samples)))[0], shape)
    options = ReplayOptions(shape, record=True, compare=True, neighbours=True, entropy=True)
    live = compute_log_probs(
        policy, TrainingBatch.of(given), BATCHING, temperature=1.0, routing=options
    ).routing
    _, updated = train_pass(policy, given, replace(options, replay=True, entropy=False))
    for done in (live, updated):
        used, _ = all_routes(done, given, range(len(given)))
        expected = count(given, used, shape.num_experts)
        stats = routing_stats([routing_counts(done)])[0]
        assert 0 < expected["compared"] < expected["trained"] and 0.1 < expected["flipped"] < 1.0, (
            expected
        )
        assert stats.compared == expected["compared"]
        assert np.abs(stats.flip_rate - expected["rate"]).max() < 1e-6, (
            stats.flip_rate,
            expected["rate"],
        )
        assert abs(stats.flipped_tokens - expected["flipped"]) < 1e-9, (
            stats.flipped_tokens,
            expected["flipped"],
        )
        for sample, ids, flips in zip(given, used, all_flips(done, given), strict=True):
            assert flips.dtype == np.int8 and flips.tolist() == flips_of(sample, ids)
        parts = layout.context_parallel_size * layout.tensor_model_parallel_size
        check_shares(done, given, used, parts)
        if done is live:
            assert np.abs(stats.load - expected["load"]).max() < 1e-6
        else:
            assert stats.load is None and stats.entropy is None
    some = [5, 0, 7]
    for ids, i in zip(all_routes(updated, given, some)[0], some, strict=True):
        assert np.array_equal(ids, used[i])


@pytest.mark.parametrize("name", LAYOUTS)
def test_stats_are_those_of_a_count_over_all_ranks(name, model):
    run_distributed(compare_with_counts, 1 if name == "alone" else 2, model, LAYOUTS[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Four layers, of which the second is dense."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", mlp_only_layers=[1])


def many_experts_model(folder: Path, experts: int) -> str:
    """A model whose routers like the last expert: it has the largest row."""
    path = save_tiny_model(
        folder, num_experts=experts, num_hidden_layers=2, moe_intermediate_size=4
    )
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name][-1] *= 4
    save_file(weights, file, metadata={"format": "pt"})
    return path


def many_experts(rank: int, world_size: int, path: str) -> dict[str, Any]:
    policy = policy_of(path, parallel(context=2))
    shape = shape_of(policy)
    samples = scored_samples(4)
    done = compute_log_probs(
        policy,
        TrainingBatch.of(samples),
        BATCHING,
        temperature=1.0,
        routing=ReplayOptions(shape, record=True),
    )
    routes, exchanged = all_routes(done.routing, samples, range(len(samples)))
    moved = exchanged + sum(micro_batch.bytes_moved for micro_batch in done.routing)
    chosen = {ids.dtype for micro_batch in done.routing for ids in micro_batch.chosen.values()}
    replayed = [
        replace(sample, routed_experts=ids) for sample, ids in zip(samples, routes, strict=True)
    ]
    log_probs, again = train_pass(
        policy, replayed, ReplayOptions(shape, replay=True, compare=True, record=True)
    )
    expected = trained_only(everywhere(done.log_probs, samples, policy.groups), samples)
    return {
        "routes": routes,
        "chosen": chosen,
        "distance": distance(log_probs, expected),
        "stats": routing_stats([routing_counts(again)])[0],
        "moved": moved,
    }


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_expert_ids_of_one_and_of_two_bytes(experts, dtype, tmp_path):
    path = many_experts_model(tmp_path / "model", experts)
    expected = observe_routers(load_reference(path), samples := scored_samples(4)).routes
    for outcome in run_distributed(many_experts, 2, path):
        for ids, wanted in zip(outcome["routes"], expected, strict=True):
            assert ids.dtype == wanted.dtype == dtype
            assert np.array_equal(np.sort(ids, -1), np.sort(wanted, -1))
        assert outcome["chosen"] == {torch.uint8 if dtype is np.uint8 else torch.uint16}
        assert max(ids.max() for ids in outcome["routes"]) == experts - 1, (
            "the last expert is never used"
        )
        assert outcome["distance"] <= 1e-6 and outcome["stats"].flipped_tokens == 0.0
        tokens = sum(sample.length for sample in samples)  # a row for the last token too
        assert outcome["moved"] == tokens * 2 * 2 * np.dtype(dtype).itemsize
