"""Expert ids by sample and statistics of a pass, against counts by hand; and unusual models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors.torch import load_file, save_file

from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.packing import count_trained, pack
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import hidden_states
from megatron_gspo.mcore.layers import block_spec, use_own_dispatchers, use_own_operators
from megatron_gspo.mcore.model import transformer_config
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.routing_replay.gather_results import (
    routing_stats,
    shared_experts_of_replica,
)
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, ReplayOptions
from megatron_gspo.mcore.routing_replay.router_hooks import (
    attach_router_hooks,
    moe_layers,
    router_hooks,
)
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.routing_replay.statistics import RoutingStats
from tests.equivalence.cases import make_samples
from tests.mcore.test_model import shape_of as model_shape
from tests.support.configs import micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import all_flips, all_routes, everywhere
from tests.support.parallel_groups import groups_of
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

# --- stats
# ----------------------------------------------------------------------------------------------------

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
    found = []
    for sample, routes in zip(with_random_routes(samples, shape, seed=2), recorded, strict=True):
        changed = g.random(routes.shape[:2]) < 0.25
        routes = np.where(changed[..., None], sample.routed_experts, routes)
        found.append(
            replace(sample, routed_experts=routes, missing_routes=g.random(len(routes)) < 0.125)
        )
    return found


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


def flips_of(sample: Any, used: np.ndarray) -> list[int]:
    """Of each response token, one by one: 1 or 0, and -1 where nothing was compared."""
    found = []
    for j in range(sample.response_length):
        row = sample.prompt_length - 1 + j
        is_missing = sample.missing_routes is not None and sample.missing_routes[row]
        layers = zip(used[row].tolist(), sample.routed_experts[row].tolist(), strict=True)
        found.append(
            -1
            if is_missing or not sample.loss_mask[j]
            else int(any(set(a) != set(b) for a, b in layers))
        )
    return found


def shares_of(sample: Any, used: np.ndarray, layers: list[int]) -> list[list[float]]:
    """Of each row, one by one: the share of the used experts in its own given row, the next one and
    the previous one; -1 where one of the two is unknown or absent."""
    found = []
    for row in range(len(used)):
        values = []
        for other in (row, row + 1, row - 1):
            rows = (row, other)
            if not 0 <= other < len(used) or sample.missing_routes[list(rows)].any():
                values.append(-1.0)
                continue
            given = sample.routed_experts[other]
            values.append(
                np.mean(
                    [len(set(used[row, i].tolist()) & set(given[i].tolist())) / 2 for i in layers]
                )
            )
        found.append(values)
    return found


def check_shares(done: Any, batch: TrainingBatch, used: list[np.ndarray], parts: int) -> None:
    """With ``parts`` of a sequence on other ranks some neighbours are not seen."""
    shares, starts = shared_experts_of_replica(done, batch)
    layers = sorted(done[0].layers)
    seen = 0
    expected_seen = 0
    own = [i for routes in done for i in routes.layout.sample_ids]
    assert len(shares) == starts[-1] == sum(batch.samples[i].length - 1 for i in own)
    for i in own:
        found = np.nan_to_num(shares[starts[i] : starts[i + 1]], nan=-1.0)
        expected = np.array(shares_of(batch.samples[i], used[i], layers))
        compared = found >= 0
        assert np.abs(found - expected)[compared].max() < 1e-9 and (expected[compared] >= 0).all()
        assert (compared[:, 0] == (expected[:, 0] >= 0)).all(), "the own row is always seen"
        seen = seen + compared.sum()
        expected_seen = expected_seen + (expected >= 0).sum()
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
        found = routing_stats(done)
        assert 0 < expected["compared"] < expected["trained"] and 0.1 < expected["flipped"] < 1.0, (
            expected
        )
        assert found.compared == expected["compared"]
        assert np.abs(found.flip_rate - expected["rate"]).max() < 1e-6, (
            found.flip_rate,
            expected["rate"],
        )
        assert abs(found.flipped_tokens - expected["flipped"]) < 1e-9, (
            found.flipped_tokens,
            expected["flipped"],
        )
        for sample, ids, flips in zip(given, used, all_flips(done, given), strict=True):
            assert flips.dtype == np.int8 and flips.tolist() == flips_of(sample, ids)
        parts = layout.context_parallel_size * layout.tensor_model_parallel_size
        check_shares(done, TrainingBatch.of(given), used, parts)
        if done is live:
            assert np.abs(found.load - expected["load"]).max() < 1e-6
        else:
            assert found.load is None and found.entropy is None
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


def odd_passes(rank: int, world_size: int, path: str) -> dict[str, Any]:
    policy = policy_of(path)
    shape = shape_of(policy)
    samples = scored_samples(2)
    unknown = with_random_routes(samples, shape)
    for sample in unknown:
        sample.missing_routes = np.ones(sample.length - 1, dtype=bool)
    known = with_random_routes(samples, shape)
    known[0].missing_routes = np.ones(known[0].length - 1, dtype=bool)
    untrained = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in known]
    options = ReplayOptions(shape, compare=True)
    found: dict[str, Any] = {}
    for name, batch in (("unknown", unknown), ("known", known), ("untrained", untrained)):
        scores = compute_log_probs(
            policy,
            TrainingBatch.of(batch),
            micro_batches_of(80, 1),
            temperature=1.0,
            routing=options,
        )
        found[name] = ([routes.compare for routes in scores.routing], routing_stats(scores.routing))
    options = ReplayOptions(shape, record=True)
    done = compute_log_probs(
        policy, TrainingBatch.of(samples), BATCHING, temperature=1.0, routing=options
    ).routing
    _, exchanged = all_routes(done, samples, [0])
    found["moved"] = exchanged + sum(routes.bytes_moved for routes in done)
    return found


def test_only_micro_batches_with_a_known_route_of_a_trained_token_are_compared(model):
    """``make_samples`` trains no token of the second sample.

    And one process on the CPU moves nothing.
    """
    found = run_distributed(odd_passes, 1, model)[0]
    for name in ("unknown", "known", "untrained"):
        compared, stats = found[name]
        assert compared == [False, False], name
        assert (
            stats.compared == 0
            and np.isnan(stats.flipped_tokens)
            and np.isnan(stats.flip_rate).all()
        )
    if not torch.cuda.is_available():
        assert found["moved"] == 0


# --- storage
# ----------------------------------------------------------------------------------------------------


def store(rank: int, world_size: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place in ("device", "host"):
        policy = policy_of(path)
        samples = scored_samples()
        shape = shape_of(policy)
        options = ReplayOptions(shape, record=True, compare=True, entropy=True, storage=place)
        given = with_random_routes(samples, shape, missing=0.2)
        done = compute_log_probs(
            policy, TrainingBatch.of(given), BATCHING, temperature=1.0, routing=options
        ).routing
        routes, _ = all_routes(done, samples, range(len(samples)))
        pinned = [ids.is_pinned() for one in done for ids in one.chosen.values()]
        replay = ReplayOptions(shape, replay=True, storage=place)
        log_probs, _ = train_pass(policy, given, replay)
        found[place] = (routes, routing_stats(done), log_probs, all(pinned))
    return found


def test_storage_on_the_host_changes_nothing_but_the_place(model):
    found = run_distributed(store, 1, model)[0]
    (routes, stats, log_probs, _), (host_routes, host_stats, host_log_probs, _) = (
        found["device"],
        found["host"],
    )
    assert all(np.array_equal(a, b) for a, b in zip(routes, host_routes, strict=True))
    assert distance(log_probs, host_log_probs) == 0.0
    same(stats, host_stats)


def same(a: RoutingStats, b: RoutingStats) -> None:
    assert (a.flipped_tokens, a.compared) == (b.flipped_tokens, b.compared)
    for name in ("flip_rate", "entropy", "load"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_routes_on_the_host_are_pinned(model):
    found = run_distributed(store, 1, model, backend="nccl")[0]
    assert found["host"][3] and not found["device"][3]


# --- many experts
# -----------------------------------------------------------------------------------------------


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
    moved = exchanged + sum(one.bytes_moved for one in done.routing)
    chosen = {ids.dtype for one in done.routing for ids in one.chosen.values()}
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
        "stats": routing_stats(again),
        "moved": moved,
    }


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_expert_ids_of_one_and_of_two_bytes(experts, dtype, tmp_path):
    path = many_experts_model(tmp_path / "model", experts)
    expected = observe_routers(load_reference(path), samples := scored_samples(4)).routes
    for found in run_distributed(many_experts, 2, path):
        for ids, wanted in zip(found["routes"], expected, strict=True):
            assert ids.dtype == wanted.dtype == dtype
            assert np.array_equal(np.sort(ids, -1), np.sort(wanted, -1))
        assert found["chosen"] == {torch.uint8 if dtype is np.uint8 else torch.uint16}
        assert max(ids.max() for ids in found["routes"]) == experts - 1, (
            "the last expert is never used"
        )
        assert found["distance"] <= 1e-6 and found["stats"].flipped_tokens == 0.0
        tokens = sum(sample.length - 1 for sample in samples)
        assert found["moved"] == tokens * 2 * 2 * np.dtype(dtype).itemsize


# --- shared experts
# -----------------------------------------------------------------------------------------------


def shared_experts(rank: int, world_size: int) -> dict[str, Any]:
    """A model with a shared expert, which no Qwen3 has: built by hand."""
    groups = groups_of(parallel())
    shape_of_model = model_shape(mlp_only_layers=[1])
    config = transformer_config(shape_of_model, parallel(), model_config())
    config.moe_shared_expert_intermediate_size = 16
    torch.manual_seed(1)
    spec = block_spec(config, shape_of_model, transformer_engine=False)
    chunk = GPTModel(
        config, spec, vocab_size=96, max_sequence_length=64, position_embedding_type="none"
    )
    use_own_dispatchers(chunk)
    use_own_operators(chunk, shape_of_model)
    attach_router_hooks(chunk)
    shape = RouteShape(3, 2, 8)
    found = {}
    found["shared"] = [layer.mlp.shared_experts is not None for layer in moe_layers(chunk)]
    samples = with_random_routes(make_samples(count=3), shape)
    hidden = {}
    for name, options in (
        ("record", ReplayOptions(shape, record=True)),
        ("replay", ReplayOptions(shape, replay=True)),
        ("again", ReplayOptions(shape, replay=True, compare=True)),
    ):
        hidden[name], done = run_chunk(chunk, samples, options, groups)
        if name == "record":
            routes, _ = all_routes(done, samples, range(len(samples)))
        if name == "replay":
            samples = [
                replace(sample, routed_experts=ids)
                for sample, ids in zip(samples, routes, strict=True)
            ]
    found["stats"] = routing_stats(done)
    found["random"] = float((hidden["replay"] - hidden["record"]).abs().max())
    rows = torch.ones(hidden["record"].shape[1], dtype=torch.bool)
    rows[np.cumsum([sample.length for sample in samples]) - 1] = (
        False  # the last tokens have no route of their own
    )
    found["recorded"] = float((hidden["again"] - hidden["record"])[:, rows].abs().max())
    hidden["again"].square().sum().backward()
    layers = moe_layers(chunk)
    found["gradients"] = [
        float(p.grad.abs().max())
        for layer in layers
        for p in (layer.mlp.router.weight, *layer.mlp.shared_experts.parameters())
    ]
    return found


def run_chunk(
    chunk: Any, samples: list[Sample], options: ReplayOptions, groups: ProcessGroups
) -> tuple[Any, list[MicroBatchRoutes]]:
    sequences, tokens = count_trained(samples)
    batch = pack(samples, num_sequences=sequences, num_tokens=tokens, routes=options.shape)
    routes = MicroBatchRoutes(options, batch, groups, sequence_parallel=False)
    routes.begin_chunk(batch, [hook.layer for hook in router_hooks(chunk)])
    hidden = hidden_states(chunk, batch, groups, routes)
    routes.check_uses(forward_only=False)
    return hidden, [routes]


def test_a_model_with_shared_experts(tmp_path):
    found = run_distributed(shared_experts, 1)[0]
    assert found["shared"] == [True] * 3
    assert (
        found["random"] > 1e-3 and found["recorded"] == 0.0 and found["stats"].flipped_tokens == 0.0
    )
    assert min(found["gradients"]) > 0.0
