"""Generation of a share on each rank, and samples from there to the replicas that train them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from megatron_gspo.config import Config, SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.advantages import with_advantages
from megatron_gspo.rollout import sample_exchange
from megatron_gspo.rollout.sample_codec import encode_samples
from megatron_gspo.rollout.sample_exchange import (
    exchange_rounds,
    generate_on_ranks,
    move_samples,
    replica_homes,
    sample_bytes,
    split_prompts,
)
from megatron_gspo.routing_replay.routes import RouteShape
from tests.support.distributed import collectives_so_far, run_distributed
from tests.support.random_samples import (
    all_samples,
    all_trained_samples,
    assert_same,
    random_sample,
    trained_samples,
)
from tests.support.reference_models import (
    checkpoint,
    loaded_engine,
    moe_config,
    prompts,
    reference_model,
)
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse
from tests.support.training_runs import base_config


@pytest.mark.parametrize("count, ranks", [(0, 3), (2, 3), (16, 4), (17, 4), (101, 8)])
def test_a_split_is_complete_and_balanced(count, ranks):
    rng = np.random.default_rng(0)
    questions = [
        Prompt(i, np.ones(n, dtype=np.int64), "") for i, n in enumerate(rng.integers(1, 50, count))
    ]
    shares = split_prompts(questions, ranks)
    assert sorted(i for share in shares for i in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert len(sizes) == ranks and max(sizes) - min(sizes) <= 1
    tokens = [sum(questions[i].length for i in share) for share in shares]
    assert max(tokens) - min(tokens) <= max((q.length for q in questions), default=0)


def spread_over_ranks(rank, world_size):
    """Embedded engines on every rank against one engine over all prompts; arbitrary samples; a
    failure.
    """
    group = dist.group.WORLD
    reference = reference_model(moe_config())
    engine = loaded_engine(moe_config(), checkpoint(reference), return_routed_experts=True)
    questions = prompts(7)
    sampling = SamplingParams(3, 12)
    expected = engine.generate(questions, sampling, seed=3)
    spread = all_samples(generate_on_ranks(engine, questions, sampling, seed=3, group=group))
    assert len(spread) == len(expected) == 21
    assert all(sample.routed_experts is not None for sample in spread)
    for a, b in zip(spread, expected, strict=True):
        np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        a.rollout_log_probs = b.rollout_log_probs
        assert_same(a, b)
    # Idle ranks.
    assert len(generate_on_ranks(engine, questions[:1], sampling, seed=3, group=group)) == 3

    return [s.response_ids.tolist() for s in spread], fail_on_one_rank(rank)


def fail_on_one_rank(rank):
    def script(prompt, sample_index, seed):
        if rank == 1:
            raise ValueError("prompt 3 is cursed")
        return ScriptedResponse([1])

    try:
        generate_on_ranks(
            ScriptedEngine(script), prompts(4), SamplingParams(1, 2), seed=0, group=dist.group.WORLD
        )
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)  # the group still works
    return message, total.item()


def test_every_rank_gets_what_one_engine_gives_and_hears_of_a_failure():
    spread, failures = zip(*run_distributed(spread_over_ranks, 2), strict=True)
    assert spread[0] == spread[1]
    failure = "the engine ScriptedEngine failed: ValueError: prompt 3 is cursed"
    told = f"EngineError: generation failed on rank 1 of the group: {failure}"
    assert failures == ((told, 2.0), (f"EngineError: {failure}", 2.0))


# --- to the replicas


def routed_sample(rng, i):
    """A random sample of a rollout with log-probs and with routes of three layers x 2, some of them
    missing."""
    sample = random_sample(rng, i)
    num_routes = sample.length - 1
    routes = rng.integers(0, 8, (num_routes, 3, 2)).astype(np.uint8)
    missing = rng.random(num_routes) < 0.5 if i % 2 else None
    return replace(
        sample,
        rollout_log_probs=-rng.random(sample.response_length).astype(np.float32),
        old_log_probs=None,
        ref_log_probs=None,
        advantages=None,
        rollout_top_ids=None,
        rollout_top_log_probs=None,
        support_lengths=None,
        support_ids=None,
        routed_experts=routes,
        missing_routes=missing,
        metadata={},
    )


def moved(rank, world, layout, stages):
    """Random samples, held by some ranks, each to a replica, a sample a round and all in one:
    (replica, positions).

    stages: the layers whose routes each pipeline stage keeps.
    """
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    groups = {name: mesh.get_group(name) for name in layout}
    everything = [
        routed
        for i in range(17)
        if (routed := routed_sample(np.random.default_rng(i), i)).response_length
    ]
    stage = stages[dist.get_rank(groups["pp"])]
    # Of one shape: a sample in the place of another is seen by its values alone.
    one = next(sample for sample in everything if sample.token_versions is not None)
    alike = [replace(one, tokens=one.tokens + i) for i in range(8)]
    move(rank, groups, alike, np.arange(8) % layout["dp"], [0], stage)
    replica = np.random.default_rng(5).integers(0, layout["dp"], len(everything))
    replica[:3] = layout["dp"] - 1
    for holders in ([0], [0, 1, 2, 3], [3, 1]):
        for bucket_bytes in (1, 64 << 20):
            sample_exchange.BUCKET_BYTES = bucket_bytes
            held = move(rank, groups, everything, replica, holders, stage)
    sample_exchange.BUCKET_BYTES = 1
    firsts = mesh.mesh[0, :, 0, 0].tolist()
    homes = np.arange(len(everything)) % layout["dp"]
    passes_on = max(layout["pp"], layout["cp"], layout["tp"]) == world  # over the same group
    move(
        rank,
        groups,
        everything,
        homes,
        [firsts[home] for home in homes],
        stage,
        sends=passes_on,
    )
    whole = SampleBatch.of(everything)  # every rank holds all
    assert replica_homes(whole, groups["dp"]) is None
    there = move_samples(
        whole,
        replica,
        SimpleNamespace(**groups),
        routes=shape_of(stage),
    )
    check_held(there, everything, stage)
    return held


def shape_of(layers):
    return None if layers is None else RouteShape(3, 2, 8, held=layers)


def check_held(there, everything, layers):
    """The columns are those of the samples, with the routes of these layers; on other than the
    last stage of a pipeline no more than a stage reads."""
    stage = None if there.pipeline is None else dist.get_rank(there.pipeline)
    is_last = stage is None or stage == dist.get_world_size(there.pipeline) - 1
    assert there.has_loss == is_last and ("tokens" in there.inputs) == (is_last or stage == 0)
    for position in there.inputs.positions.tolist():
        given = everything[position]
        if "tokens" in there.inputs:
            tokens = there.inputs.of_sample("tokens", position)
            np.testing.assert_array_equal(tokens, given.tokens)
        trained = there.inputs.of_sample("trained", position)[given.prompt_length :]
        np.testing.assert_array_equal(trained, given.loss_mask)
        routes = given.routed_experts
        if layers is not None:
            routes = np.take(routes, layers, axis=1)
        held_routes = there.inputs.of_sample("routed_experts", position)[:-1]
        np.testing.assert_array_equal(held_routes, routes)
        missing = there.inputs.of_sample("missing_routes", position)[:-1]
        expected = np.zeros(len(missing)) if given.missing_routes is None else given.missing_routes
        np.testing.assert_array_equal(missing, expected)
    if not is_last:
        assert len(there.responses) == 0 == len(there.samples)
        return
    for position, sample in zip(there.samples, trained_samples(there), strict=True):
        given = everything[position]
        # They are known of every token.
        versions = np.full(given.response_length, given.weight_version, dtype=np.int32)
        if given.token_versions is not None:
            versions = given.token_versions
        wanted = {name: getattr(sample, name) for name in ("routed_experts", "missing_routes")}
        assert_same(sample, replace(given, token_versions=versions, **wanted))


def move(rank, groups, everything, replica, holders, layers, sends=True):
    """Checks that what arrives is right and complete.

    sends: whether anything may go over the world.
    """
    held_positions = [i for i in range(len(everything)) if holders[i % len(holders)] == rank]
    batch = SampleBatch.gathered(
        [everything[i] for i in held_positions], held_positions, dist.group.WORLD
    )
    replica_of_rank = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    replica_of_rank[rank] = dist.get_rank(groups["dp"])
    dist.all_reduce(replica_of_rank)
    homes = [int(replica_of_rank[holders[i % len(holders)]]) for i in range(len(everything))]
    assert replica_homes(batch, groups["dp"]).tolist() == homes
    so_far = collectives_so_far()
    there = move_samples(batch, replica, SimpleNamespace(**groups), routes=shape_of(layers))
    assert sends or collectives_so_far() == so_far + 2, (
        "the ranks learn sizes and first ranks; what stays is not sent"
    )
    own_replica = dist.get_rank(groups["dp"])
    assert there.inputs.positions.tolist() == np.flatnonzero(replica == own_replica).tolist()
    assert there.group is groups["dp"]
    check_held(there, everything, layers)
    if dist.get_world_size(groups["pp"]) > 1:
        assert there.pipeline is groups["pp"]
    assert len(batch.held) == 0, "a sample's memory is free once it has left"
    assert there.table["holder"].tolist() == replica.tolist()
    for name in set(there.table.dtype.names) - {"holder"}:
        np.testing.assert_array_equal(there.table[name], batch.table[name])
    if there.has_loss:
        assert len(all_trained_samples(there)) == len(everything)
    return own_replica, there.inputs.positions.tolist()


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ({"pp": 1, "dp": 4, "cp": 1, "tp": 1}, [(0, 1, 2)]),
        ({"pp": 1, "dp": 2, "cp": 1, "tp": 2}, [None]),
        ({"pp": 2, "dp": 2, "cp": 1, "tp": 1}, [(0, 2), (1,)]),
        ({"pp": 1, "dp": 1, "cp": 2, "tp": 2}, [(0, 1, 2)]),
        ({"pp": 2, "dp": 1, "cp": 1, "tp": 2}, [(), (0, 1, 2)]),
        ({"pp": 2, "dp": 1, "cp": 2, "tp": 1}, [None, None]),
        ({"pp": 4, "dp": 1, "cp": 1, "tp": 1}, [(0,), (), (1, 2), ()]),
    ],
    ids=str,
)
def test_every_sample_is_on_each_rank_of_its_replica_and_nowhere_else(layout, stages):
    by_rank = run_distributed(moved, 4, layout, stages)
    replicas = dict(by_rank)
    assert all(replicas[replica] == held for replica, held in by_rank), (
        "the ranks of a replica have the same samples"
    )
    assert sorted(i for held in replicas.values() for i in held) == list(
        range(sum(map(len, replicas.values())))
    )


def stage_bytes(rank: int, world: int) -> int:
    """Bytes that a stage of a pipeline of three holds of 5 prompt and 900 response tokens with
    routes of 6 layers x 8, two layers a stage, and with what the loop adds to them."""
    names = ("pp", "dp", "cp", "tp")
    mesh = init_device_mesh("cpu", (3, 1, 1, 1), mesh_dim_names=names)
    groups = SimpleNamespace(**{name: mesh.get_group(name) for name in names})
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 128, (904, 6, 8)).astype(np.uint8)
    sample = Sample(
        0,
        0,
        np.arange(905),
        5,
        np.arange(900) % 3 > 0,
        -rng.random(900).astype(np.float32),
        "stop",
        "two words",
        routed_experts=routes,
    )
    batch = SampleBatch.gathered(
        [sample] if rank == 1 else [], [0] if rank == 1 else [], dist.group.WORLD
    )
    shape = RouteShape(6, 8, 128, held=(2 * rank, 2 * rank + 1))
    there = move_samples(batch, np.zeros(1, dtype=np.int32), groups, routes=shape)
    there = there.with_column("old_log_probs", there.responses["rollout_log_probs"].copy())
    there = with_advantages(
        there, Config.from_dict(base_config("model", "run")).algorithm, max_response_length=900
    )
    columns = [*there.inputs.arrays.values(), *there.responses.arrays.values()]
    return sum(column.nbytes for column in columns)


def test_a_pipeline_stage_holds_what_it_reads():
    routes_and_mask = 905 * 2 * 8 + 905 + 905  # whether a row is missing, and whether it is trained
    tokens = 8 * 905
    floats = 4 * 900
    masks = 2 * 900
    bytes_of_stages = run_distributed(stage_bytes, 3)
    assert bytes_of_stages == [
        routes_and_mask + tokens,
        routes_and_mask,
        routes_and_mask + tokens + 3 * floats + masks,
    ]


@pytest.mark.parametrize("largest", [2**18 - 1, 2**18])
def test_most_likely_ids_count_as_what_is_sent_of_them(largest):
    """Where one id needs 8 bytes, all are sent in 8."""
    ids = np.full((300, 64), 2, dtype=np.int32)
    ids[-1, -1] = largest
    sample = Sample(
        0,
        0,
        np.arange(305),
        5,
        np.ones(300, dtype=bool),
        np.zeros(300, dtype=np.float32),
        "stop",
        rollout_top_ids=ids,
        rollout_top_log_probs=np.full((300, 64), -3.0, dtype=np.float32),
    )
    small = replace(sample, rollout_top_ids=np.zeros_like(ids))
    counted = sample_bytes(SampleBatch.of([small, sample])).sum()
    assert counted == pytest.approx(len(encode_samples([small, sample], [0, 1])), rel=0.05)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60
    ),
    st.integers(1, 200),
)
def test_no_rank_sends_or_receives_more_than_a_bucket_in_a_round(moves, bucket):
    sizes, source, target = (np.array(column) for column in zip(*moves, strict=True))
    rounds = exchange_rounds(sizes, source, target, bucket)
    for number in range(int(rounds.max()) + 1):
        for ranks in (source, target):
            for rank in np.unique(ranks):
                inside = sizes[(rounds == number) & (ranks == rank)]
                assert inside.sum() <= bucket or len(inside) == 1
    least = max(
        sizes[ranks == rank].sum() for ranks in (source, target) for rank in np.unique(ranks)
    )
    assert rounds.max() <= 4 * (least // bucket + 1) + len(sizes) * (sizes.max() > bucket / 2)
