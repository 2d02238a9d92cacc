"""A teacher's scores in every kind of layout against Transformers in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_gspo.data.packing import context_parallel_shard
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.micro_batches import values_of_replica
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import compute_teacher_scores, pack_mini_batch
from megatron_gspo.parallel.log_probs import LogProbOptions, divergence_from_hidden
from megatron_gspo.parallel.scored_rows import ScoredRows
from tests.equivalence.cases import make_samples, with_branches
from tests.support.configs import micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import by_sample
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import all_log_probs, load_reference, response_log_probs

LAYOUTS = {
    1: {"one process": parallel()},
    2: {
        "tensor": parallel(tensor=2),
        "pipeline": parallel(pipeline=2),
        "context": parallel(context=2),
        "data": parallel(),
    },
}
TEMPERATURE = 0.8
VOCABULARY = 91  # of the policy; the teacher has five ids more, and other shards of two ranks
TOP_K = 4


def all_samples() -> list[Sample]:
    return with_branches(make_samples(3, 8, vocab_size=VOCABULARY), 3)


def divergences_from_a_uniform_policy(
    teacher: Policy, policy: Policy, batch: TrainingBatch
) -> np.ndarray:
    """[T, 2] from the teacher's states, in the policy's rows of the vocabulary, by its head."""
    training = micro_batches_of(80)
    states = compute_teacher_scores(
        teacher,
        batch,
        training,
        temperature=TEMPERATURE,
        vocab_size=VOCABULARY,
        top_k=0,
        states_for=policy,
    ).states
    groups = teacher.groups
    rank, size = (
        (groups.tp.rank(), groups.tp.size()) if teacher.config.sequence_parallel else (0, 1)
    )
    batches = pack_mini_batch(teacher, batch, training, optional=(), routing=None)
    values = []
    for number in range(len(states.hidden)):
        shard = context_parallel_shard(batches.batches[number], groups.cp.rank(), groups.cp.size())
        head = states.head(number)
        tokens = len(shard.labels)
        _, _, divergences = divergence_from_hidden(
            torch.zeros(tokens // size, 4),
            torch.zeros(len(head.weight), 4),
            torch.zeros(tokens, dtype=torch.int64),
            head,
            LogProbOptions(TEMPERATURE, VOCABULARY),
            tp_group=groups.tp,
            sequence_parallel=size > 1,
            scored=ScoredRows.of(shard.response_mask, rank, size),
        )
        values.append(divergences)
    return values_of_replica(values, batches.layouts, batch, groups, shape=(2,))


def scores_in_every_layout(
    rank: int, world_size: int, path: str, policy_path: str
) -> dict[str, list[list[np.ndarray]]]:
    samples = all_samples()
    scores = {}
    for name, layout in LAYOUTS[world_size].items():
        groups = groups_of(layout)
        model = model_config(path, implementation="torch")
        teacher = build_policy(model, layout, groups, optimizer=None)
        for top_k in (0, TOP_K):
            score = compute_teacher_scores(
                teacher,
                TrainingBatch.of(samples),
                micro_batches_of(80),
                temperature=TEMPERATURE,
                vocab_size=VOCABULARY,
                top_k=top_k,
            )
            assert teacher.memory.released
            columns = [score.log_probs, score.top_ids, score.top_log_probs]
            if top_k == 0:
                policy = build_policy(
                    model_config(policy_path, implementation="torch"),
                    layout,
                    groups,
                    optimizer=None,
                )
                columns.append(
                    divergences_from_a_uniform_policy(teacher, policy, TrainingBatch.of(samples))
                )
            # Replicas hold the scores of the samples that they would train, and 0 elsewhere.
            summed = [torch.from_numpy(column) for column in columns]
            for column in summed:
                torch.distributed.all_reduce(column, group=groups.dp)
            scores[f"{name}, {top_k}"] = [by_sample(column.numpy(), samples) for column in summed]
    return scores


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_scores_are_those_of_transformers(world_size, tmp_path):
    path = save_tiny_model(tmp_path / "moe")
    policy_path = save_tiny_model(tmp_path / "policy", vocab_size=VOCABULARY)
    reference = load_reference(path)
    head = reference.lm_head
    head.weight.data = head.weight.data[:VOCABULARY]  # other ids have no probability
    samples = all_samples()
    expected = []
    top = []
    with torch.no_grad():
        for sample in samples:
            expected.append(response_log_probs(reference, sample, TEMPERATURE)[0].numpy())
            top.append(all_log_probs(reference, sample, TEMPERATURE))
    for scores in run_distributed(scores_in_every_layout, world_size, path, policy_path):
        for name, (log_probs, ids, top_log_probs, *divergences) in scores.items():
            for i in range(len(samples)):
                where = f"{name}, sample {i}"
                np.testing.assert_allclose(log_probs[i], expected[i], atol=2e-5, err_msg=where)
                if name.endswith(", 0"):
                    assert ids[i].shape[1] == 0
                    check_divergences(divergences[0][i], top[i], where)
                    continue
                chosen = np.sort(top[i], axis=1)[:, : -TOP_K - 1 : -1]
                np.testing.assert_allclose(top_log_probs[i], chosen, atol=2e-5, err_msg=where)
                of_ids = np.take_along_axis(top[i], ids[i].astype(np.int64), axis=1)
                np.testing.assert_allclose(top_log_probs[i], of_ids, atol=2e-5, err_msg=where)


def check_divergences(actual: np.ndarray, log_t: np.ndarray, where: str) -> None:
    """[R, 2] of a uniform policy from a teacher's distributions [R, VOCABULARY]."""
    predicted = log_t.any(axis=1)
    reverse = -log_t.mean(axis=1) - math.log(VOCABULARY)
    forward = (np.exp(log_t) * log_t).sum(axis=1) + math.log(VOCABULARY)
    expected = np.stack([reverse, forward], axis=1)[predicted]
    np.testing.assert_allclose(actual[predicted], expected, atol=2e-5, err_msg=where)
