"""A server as a teacher, beside the same model in the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gspo.config import ServerConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.teachers import ServerTeacher
from megatron_gspo.mcore.train_step import TeacherScores, compute_teacher_scores
from megatron_gspo.models import family_of, read_config
from megatron_gspo.rollout.server_engine.scoring_client import ScoringClient
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.routing_cases import policy_of

TOP_K = 8
TOLERANCE = 2e-5
_TIE = 1e-4  # nats between ids whose order may differ


def _scores(
    rank: int, world_size: int, path: str, urls: Sequence[str], kind: str, samples: list[Sample]
) -> tuple[TeacherScores, TeacherScores]:
    policy = policy_of(path, parallel())
    batch = TrainingBatch.of(samples)
    trained = compute_teacher_scores(
        policy,
        batch,
        micro_batches_of(800),
        temperature=1.0,
        vocab_size=policy.shape.vocab_size,
        top_k=TOP_K,
    )
    model = ServedModel(family_of(read_config(path))[1], top_log_probs=TOP_K)
    client = ScoringClient(ServerConfig(urls=tuple(urls)), SERVER_KINDS[kind].api, model)
    teacher = ServerTeacher(client, policy.groups)
    try:
        return teacher.score(batch, None), trained
    finally:
        teacher.close()


def assert_teachers_agree(urls: Sequence[str], path: str, kind: str, samples: list[Sample]) -> None:
    """Log-probs of the tokens and of the most likely ids, which are the same ids."""
    [(served, trained)] = run_distributed(_scores, 1, path, urls, kind, samples)
    np.testing.assert_allclose(served.log_probs, trained.log_probs, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(served.top_log_probs, trained.top_log_probs, atol=TOLERANCE, rtol=0)
    gaps = -np.diff(trained.top_log_probs, axis=1)
    is_clear = (gaps > _TIE) & np.concatenate(
        [np.ones_like(gaps[:, :1], bool), gaps[:, :-1] > _TIE], 1
    )
    assert is_clear.mean() > 0.9
    assert np.array_equal(served.top_ids[:, :-1][is_clear], trained.top_ids[:, :-1][is_clear])
