"""A teacher on servers, which answer with the log-probs of a Transformers model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web

from megatron_gspo.config import Config, ConfigError, ServerConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop.setup import check_teacher_length
from megatron_gspo.loop.teachers import ServerTeacher, packed_scores, unpacked_scores
from megatron_gspo.mcore.train_step import TeacherScores
from megatron_gspo.models import family_of, read_config
from megatron_gspo.rollout.server_engine.scoring_client import ScoringClient
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from tests.equivalence.cases import make_samples, with_branches
from tests.servers.web_server import WebServer
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.model_server import ModelServer
from tests.support.parallel_groups import groups_of
from tests.support.ports import free_port
from tests.support.training_runs import base_config, tiny_model
from tests.support.transformers_reference import all_log_probs, load_reference, response_log_probs


def samples() -> list[Sample]:
    return with_branches(make_samples(3, 6, vocab_size=60), 3)


TOP_K = 4


def client_of(path: str, *urls: str) -> ScoringClient:
    config = ServerConfig(urls=urls, retries=1)
    shape = family_of(read_config(path))[1]
    return ScoringClient(config, SGLangAPI(), ServedModel(shape, top_log_probs=TOP_K))


def score(path: str, *urls: str, **layout: int) -> TeacherScores:
    teacher = ServerTeacher(client_of(path, *urls), groups_of(parallel(**layout)))
    try:
        return teacher.score(TrainingBatch.of(samples()), None)
    finally:
        teacher.close()


def scores_of_ranks(rank: int, world_size: int, path: str, url: str) -> TeacherScores:
    return score(path, f"http://127.0.0.1:{free_port()}", url, tensor=2, context=world_size // 2)


def message_of_ranks(rank: int, world_size: int, path: str, url: str) -> str:
    with pytest.raises(SharedEngineError) as error:
        score(path, url, tensor=world_size)
    return str(error.value)


def check_top(scores: TeacherScores, expected: np.ndarray) -> None:
    """expected: [T, vocabulary], 0 where nothing predicts."""
    predicted = expected.any(axis=1)
    chosen = np.sort(expected, axis=1)[predicted, : -TOP_K - 1 : -1]
    np.testing.assert_allclose(scores.top_log_probs[predicted], chosen, atol=2e-5)
    of_ids = np.take_along_axis(expected, scores.top_ids.astype(np.int64), axis=1)[predicted]
    np.testing.assert_allclose(scores.top_log_probs[predicted], of_ids, atol=2e-5)


def test_every_rank_has_the_scores_although_a_server_is_down(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    reference = load_reference(path)
    with torch.no_grad():
        expected = [response_log_probs(reference, sample)[0].numpy() for sample in samples()]
        top = [all_log_probs(reference, sample) for sample in samples()]
    with ModelServer(path) as server:
        for scores in run_distributed(scores_of_ranks, 4, path, server.url):
            assert scores.log_probs.dtype == np.float32
            np.testing.assert_allclose(scores.log_probs, np.concatenate(expected), atol=2e-5)
            check_top(scores, np.concatenate(top))
        assert server.scored == sum(sample.num_rows for sample in samples())


@pytest.mark.parametrize(("largest", "pair_bytes"), [(2**18 - 1, 6), (2**24 + 1, 8)])
def test_most_likely_ids_are_sent_in_6_bytes_with_their_log_probs(
    largest: int, pair_bytes: int
) -> None:
    rng = np.random.default_rng(0)
    scores = TeacherScores(
        log_probs=-rng.exponential(4, 30).astype(np.float32),
        top_ids=largest - np.arange(30 * TOP_K, dtype=np.int32).reshape(30, TOP_K),
        top_log_probs=-rng.exponential(4, (30, TOP_K)).astype(np.float32),
    )
    sent = packed_scores(scores)
    assert sent.nbytes == 30 * (4 + pair_bytes * TOP_K)
    received = unpacked_scores(sent, 30, TOP_K)
    for name in ("log_probs", "top_ids", "top_log_probs"):
        np.testing.assert_array_equal(getattr(received, name), getattr(scores, name), strict=True)


@pytest.mark.parametrize(("num_tokens", "top_count"), [(0, TOP_K), (3, 0)])
def test_scores_without_tokens_or_ids_have_their_shapes(num_tokens: int, top_count: int) -> None:
    log_probs = np.arange(num_tokens, dtype=np.float32)
    ids = np.zeros((num_tokens, top_count), dtype=np.int32)
    scores = TeacherScores(log_probs, ids, ids.astype(np.float32))
    received = unpacked_scores(packed_scores(scores), num_tokens, top_count)
    for name in ("log_probs", "top_ids", "top_log_probs"):
        np.testing.assert_array_equal(getattr(received, name), getattr(scores, name), strict=True)


def test_a_server_that_scores_other_tokens_is_found_on_every_rank(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")

    async def shorter(request: web.Request) -> web.StreamResponse:
        tokens = (await request.json())["input_ids"]
        rows = [[None, tokens[0], None]] + [[-1.0, token, None] for token in tokens[2:]]
        return web.json_response({"meta_info": {"input_token_logprobs": rows}})

    with WebServer(shorter) as server:
        messages = run_distributed(message_of_ranks, 2, path, server.url)
        assert len(set(messages)) == 1
        assert f"the teacher at {server.url}: input_token_logprobs has" in messages[0]


def info_of(**limits: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answers that tell SGLang's limits."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tp_size": 1, "pp_size": 1, "dp_size": 1, **limits})

    return answer


def test_a_server_that_cannot_score_the_longest_sample_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    path = tiny_model(tmp_path / "model")
    plain = base_config(path, tmp_path / "run")
    plain["data"]["max_prompt_length"] = 30
    plain["rollout"]["max_response_length"] = 70
    plain["algorithm"] = {"name": "gspo_token"}
    silent = f"http://127.0.0.1:{free_port()}"
    with (
        WebServer(info_of(max_req_input_len=100, max_total_num_tokens=101)) as enough,
        WebServer(info_of(max_req_input_len=99)) as short,
        WebServer(info_of(max_total_num_tokens=100)) as small,
    ):
        for url, says in (
            (short.url, f"{short.url} takes at most 99 tokens"),
            (small.url, f"{small.url} holds sequences of at most 100 tokens"),
            (None, ""),
        ):
            urls = [silent, enough.url, *([url] if url else [])]
            config = Config.from_dict(plain | {"distillation": {"teacher": path, "urls": urls}})
            client = client_of(path, *urls)
            problem = ""
            try:
                check_teacher_length(client, config.distillation.by_name[""], config)
            except ConfigError as error:
                problem = str(error)
            finally:
                client.close()
            assert bool(problem) == bool(says)
            assert says in problem and (not says or "with a larger --context-length" in problem)


def test_no_server_is_an_error_of_every_rank(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    url = f"http://127.0.0.1:{free_port()}"
    for message in run_distributed(message_of_ranks, 2, path, url):
        assert message.startswith(f"server {url}/generate: no connection")
