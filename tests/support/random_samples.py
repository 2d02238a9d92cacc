"""Samples with any subset of the optional fields, and those of all ranks."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import BatchTable, SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch

SAMPLE_FIELDS = {field.name for field in fields(Sample)}


def assert_same(a: Sample, b: Sample) -> None:
    for field in fields(Sample):
        x = getattr(a, field.name)
        y = getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert isinstance(y, np.ndarray), field.name
            assert x.dtype == y.dtype, field.name
            np.testing.assert_array_equal(x, y, err_msg=field.name)
        else:
            assert not isinstance(y, np.ndarray), field.name
            assert x == y or (isinstance(x, float) and math.isnan(x) and math.isnan(y)), field.name


def random_sample(rng: np.random.Generator, i: int) -> Sample:
    """A sample with any subset of the optional fields."""
    prompt = rng.integers(1, 6)
    response = rng.integers(0, 6)
    layers = 3
    k = rng.integers(1, 3)

    def maybe(values):
        return values if rng.random() < 0.5 else None

    def per_token():
        return maybe(-rng.random(response).astype(np.float32))

    kind = [np.uint8, np.uint16][i % 2]
    positions = prompt + response - 1
    starts = prompt + 1 + np.flatnonzero(rng.random(max(response - 1, 0)) < 0.3)
    row_lengths = maybe(np.diff(np.concatenate([[0], starts, [prompt + response]])))
    loss_mask = rng.random(response) < 0.7
    if row_lengths is not None:
        loss_mask[starts - prompt] = False
    versions = maybe(rng.integers(0, 9, response).astype(np.int32))
    top_ids = maybe(rng.integers(0, 200_000, (response, k)).astype(np.int32))
    support_lengths = maybe(rng.integers(1, 4, response).astype(np.int32))
    routes = maybe(rng.integers(0, np.iinfo(kind).max + 1, (positions, layers, k)).astype(kind))
    return Sample(
        prompt_index=int(rng.integers(0, 2**40)),
        sample_index=i,
        tokens=rng.integers(0, 200_000, prompt + response),
        prompt_length=int(prompt),
        loss_mask=loss_mask,
        rollout_log_probs=per_token(),
        finish_reason=["stop", "length", "abort"][i % 3],
        text=["", "plain", "Größe ≤ 3 🎲"][int(rng.integers(0, 3))],
        weight_version=int(rng.integers(0, 9)),
        reward=[math.nan, 0.1, -math.inf][int(rng.integers(0, 3))],
        advantages=per_token(),
        old_log_probs=per_token(),
        ref_log_probs=per_token(),
        routed_experts=routes,
        missing_routes=None if routes is None else maybe(rng.random(positions) < 0.5),
        token_versions=versions,
        row_lengths=row_lengths,
        support_lengths=support_lengths,
        support_ids=(
            None
            if support_lengths is None
            else rng.integers(0, 200_000, support_lengths.sum()).astype(np.int32)
        ),
        rollout_top_ids=top_ids,
        rollout_top_log_probs=None if top_ids is None else -rng.random((response, k), np.float32),
        metadata=maybe({"turns": [{"start": 0, "end": 1, "reward": 0.5}], "name": "é"}) or {},
    )


def all_samples(batch: SampleBatch) -> list[Sample]:
    """The samples of all ranks, by position, if each is held once."""
    return _gathered(batch, dict(batch.held))


def all_trained_samples(batch: TrainingBatch) -> list[Sample]:
    """`trained_samples` of all replicas, by position; none on a pipeline stage without the loss."""
    if not batch.has_loss:
        return []
    return _gathered(batch, dict(zip(batch.samples, trained_samples(batch), strict=True)))


def trained_samples(batch: TrainingBatch) -> list[Sample]:
    """This replica's samples, by position, with the batch's columns as their fields."""
    return [
        replace(
            sample,
            **{
                name: batch.responses.of_sample(name, position)
                for name in batch.responses.arrays
                if name != "generated" and name in SAMPLE_FIELDS
            },
            **_routes(batch, position),
        )
        for position, sample in batch.samples.items()
    ]


def _routes(batch: TrainingBatch, position: int) -> dict[str, Any]:
    if "routed_experts" not in batch.inputs:
        return {}
    missing = batch.inputs.of_sample("missing_routes", position)[:-1]
    return {
        "routed_experts": batch.inputs.of_sample("routed_experts", position)[:-1],
        "missing_routes": missing if missing.any() else None,
    }


def _gathered(batch: BatchTable, held: dict[int, Sample]) -> list[Sample]:
    if batch.group is None:
        return list(held.values())
    everyone: list[Any] = [None] * dist.get_world_size(batch.group)
    dist.all_gather_object(everyone, held, group=batch.group)
    samples = {i: sample for of_rank in everyone for i, sample in of_rank.items()}
    assert sum(map(len, everyone)) == len(samples) == len(batch), (
        "a sample is held twice, or not at all"
    )
    return [samples[i] for i in range(len(batch))]
