import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.sample_exchange import (
    decode_samples,
    encode_samples,
    gather_samples,
    generate_on_ranks,
    split_prompts,
)
from tests.support.distributed import run_distributed
from tests.support.reference_models import checkpoint, loaded_engine, moe_config, prompts, reference_model
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse


def assert_same(a: Sample, b: Sample) -> None:
    for field in fields(Sample):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            np.testing.assert_array_equal(x, y, err_msg=field.name)
        else:
            assert x == y or (isinstance(x, float) and math.isnan(x) and math.isnan(y)), field.name


def random_sample(rng: np.random.Generator, i: int) -> Sample:
    """A sample with any subset of the optional fields."""
    prompt, response, layers, k = rng.integers(1, 6), rng.integers(0, 6), 3, rng.integers(1, 3)

    def maybe(values):
        return values if rng.random() < 0.5 else None

    def per_token():
        return maybe(-rng.random(response).astype(np.float32))

    kind, rows = [np.uint8, np.uint16][i % 2], prompt + response - 1
    versions = maybe(rng.integers(0, 9, response).astype(np.int32))
    routes = maybe(rng.integers(0, np.iinfo(kind).max + 1, (rows, layers, k)).astype(kind))
    return Sample(
        prompt_index=int(rng.integers(0, 2**40)),
        sample_index=i,
        tokens=rng.integers(0, 200_000, prompt + response),
        prompt_length=int(prompt),
        loss_mask=rng.random(response) < 0.7,
        rollout_log_probs=per_token(),
        finish_reason=["stop", "length", "abort"][i % 3],
        text=["", "plain", "Größe ≤ 3 🎲"][int(rng.integers(0, 3))],
        weight_version=int(rng.integers(0, 9)),
        reward=[math.nan, 0.1, -math.inf][int(rng.integers(0, 3))],
        advantages=per_token(),
        old_log_probs=per_token(),
        ref_log_probs=per_token(),
        routed_experts=routes,
        missing_routes=None if routes is None else maybe(rng.random(rows) < 0.5),
        token_versions=versions,
        metadata=maybe({"turns": [1, 2], "name": "é"}) or {},
    )


@pytest.mark.parametrize("count", [0, 1, 40])
def test_samples_survive_the_wire(count):
    rng = np.random.default_rng(count)
    samples = [random_sample(rng, i) for i in range(count)]
    wire = np.frombuffer(bytearray(encode_samples(samples, range(10, 10 + count))), dtype=np.uint8)
    found = decode_samples(wire)
    assert [place for place, _ in found] == list(range(10, 10 + count))
    for (_, after), before in zip(found, samples, strict=True):
        assert_same(after, before)
        assert after.routed_experts is None or after.routed_experts.flags.aligned


def test_bytes_of_another_version_are_refused():
    wire = np.frombuffer(bytearray(encode_samples([], [])), dtype=np.uint8).copy()
    assert decode_samples(wire) == []
    wire[0] ^= 1
    with pytest.raises(ValueError, match="samples were encoded by another version"):
        decode_samples(wire)


def test_routes_are_not_copied_on_arrival():
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    sample = replace(random_sample(np.random.default_rng(0), 0), tokens=np.arange(5), routed_experts=routes)
    sample = replace(sample, prompt_length=3, loss_mask=np.ones(2, bool), missing_routes=None, token_versions=None)
    for name in ("rollout_log_probs", "advantages", "old_log_probs", "ref_log_probs"):
        setattr(sample, name, None)
    wire = np.frombuffer(bytearray(encode_samples([sample], [0])), dtype=np.uint8)
    [(_, after)] = decode_samples(wire)
    assert after.routed_experts.tolist() == routes.tolist() and np.shares_memory(after.routed_experts, wire)
    after.routed_experts[0] = 9  # writable


@pytest.mark.parametrize("count, ranks", [(0, 3), (2, 3), (16, 4), (17, 4), (101, 8)])
def test_a_split_is_complete_and_balanced(count, ranks):
    rng = np.random.default_rng(0)
    questions = [Prompt(i, np.ones(n, dtype=np.int64), "") for i, n in enumerate(rng.integers(1, 50, count))]
    shares = split_prompts(questions, ranks)
    assert sorted(i for share in shares for i in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert len(sizes) == ranks and max(sizes) - min(sizes) <= 1
    tokens = [sum(questions[i].length for i in share) for share in shares]
    assert max(tokens) - min(tokens) <= max((q.length for q in questions), default=0)


def spread_over_ranks(rank, world_size):
    """Embedded engines on every rank against one engine over all prompts; arbitrary samples; a failure."""
    group = dist.group.WORLD
    reference = reference_model(moe_config())
    engine = loaded_engine(moe_config(), checkpoint(reference), return_routed_experts=True)
    questions, sampling = prompts(7), SamplingParams(3, 12)
    expected = engine.generate(questions, sampling, seed=3)
    spread = generate_on_ranks(engine, questions, sampling, seed=3, group=group)
    assert len(spread) == len(expected) == 21
    assert all(sample.routed_experts is not None for sample in spread)
    for a, b in zip(spread, expected, strict=True):
        np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        a.rollout_log_probs = b.rollout_log_probs
        assert_same(a, b)
    assert len(generate_on_ranks(engine, questions[:1], sampling, seed=3, group=group)) == 3  # idle ranks

    samples = [random_sample(np.random.default_rng(r), r) for r in range(10)]
    mine = [i for i in range(10) if i % 3 % world_size == rank]
    for a, b in zip(gather_samples([samples[i] for i in mine], mine, group), samples, strict=True):
        assert_same(a, b)
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
    own = "the engine ScriptedEngine failed: ValueError: prompt 3 is cursed"
    told = f"EngineError: generation failed on rank 1 of the group: {own}"
    assert failures == ((told, 2.0), (f"EngineError: {own}", 2.0))


def test_without_a_group_the_engine_works_alone():
    engine = ScriptedEngine(lambda prompt, i, seed: ScriptedResponse([i + 2, 1]))
    samples = generate_on_ranks(engine, prompts(2), SamplingParams(2, 2), seed=0)
    assert [s.response_ids[0] for s in samples] == [2, 3, 2, 3]
    assert gather_samples(samples[::-1], [3, 2, 1, 0], None) == samples
