"""A teacher's scores in every kind of layout against Transformers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.mcore.train_step import compute_teacher_scores
from tests.equivalence.cases import make_samples, with_branches
from tests.support.configs import micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import by_sample
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import load_reference, response_log_probs

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
VOCABULARY = 90  # of the policy; the teacher has six ids more
TOP_K = 4


def all_samples() -> list[Sample]:
    return with_branches(make_samples(3, 8, vocab_size=VOCABULARY), 3)


def scores_in_every_layout(
    rank: int, world_size: int, path: str
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
            # Replicas hold the scores of the samples that they would train, and 0 elsewhere.
            summed = [torch.from_numpy(column) for column in columns]
            for column in summed:
                torch.distributed.all_reduce(column, group=groups.dp)
            scores[f"{name}, {top_k}"] = [by_sample(column.numpy(), samples) for column in summed]
    return scores


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_scores_are_those_of_transformers(world_size, tmp_path):
    path = save_tiny_model(tmp_path / "moe")
    reference = load_reference(path)
    head = reference.lm_head
    head.weight.data = head.weight.data[:VOCABULARY]  # other ids have no probability
    samples = all_samples()
    expected = []
    top = []
    with torch.no_grad():
        for sample in samples:
            expected.append(response_log_probs(reference, sample, TEMPERATURE)[0].numpy())
            top.append(_top_log_probs(reference, sample))
    for scores in run_distributed(scores_in_every_layout, world_size, path):
        for name, (log_probs, ids, top_log_probs) in scores.items():
            for i in range(len(samples)):
                where = f"{name}, sample {i}"
                np.testing.assert_allclose(log_probs[i], expected[i], atol=2e-5, err_msg=where)
                if ids[i].shape[1] == 0:
                    assert name.endswith(", 0")
                    continue
                chosen = np.sort(top[i], axis=1)[:, : -TOP_K - 1 : -1]
                np.testing.assert_allclose(top_log_probs[i], chosen, atol=2e-5, err_msg=where)
                of_ids = np.take_along_axis(top[i], ids[i].astype(np.int64), axis=1)
                np.testing.assert_allclose(top_log_probs[i], of_ids, atol=2e-5, err_msg=where)


def _top_log_probs(model: torch.nn.Module, sample: Sample) -> np.ndarray:
    """[R, VOCABULARY] of a sample's response tokens, row by row; 0 where nothing predicts."""
    lengths = [sample.length] if sample.row_lengths is None else sample.row_lengths.tolist()
    values = np.zeros((sample.length, VOCABULARY))
    start = 0
    for length in lengths:
        tokens = torch.from_numpy(sample.tokens[start : start + length])[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0] / TEMPERATURE
        values[start + 1 : start + length] = logits.log_softmax(-1)[:-1].numpy()
        start += length
    return values[sample.prompt_length :]
