"""Episodes: what a finished one holds, token by token, with either driver."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import Span, spans
from megatron_gspo.environments.episode_engine import EpisodeEngine
from megatron_gspo.environments.episodes import (
    Episode,
    EpisodeRules,
    Request,
    request_index,
)
from megatron_gspo.errors import EngineError
from megatron_gspo.rewards.scorer import FAILURE
from tests.support.random_samples import assert_same
from tests.support.reference_models import prompts
from tests.support.scripted_episodes import Depends, encode, engine_and_reference, ok

RULES = EpisodeRules(max_turns=3, max_length=60)


def response(request: Request, ids, *, finish="stop", text="", version=0, **more) -> Sample:
    """An engine's answer to a request; log-probs -1, -2, ..."""
    ids = np.asarray(ids, dtype=np.int64)
    return Sample(
        prompt_index=request.prompt.index,
        sample_index=0,
        tokens=np.concatenate([request.prompt.token_ids, ids]),
        prompt_length=request.prompt.length,
        loss_mask=np.ones(len(ids), bool),
        rollout_log_probs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        finish_reason=finish,
        text=text,
        weight_version=version,
        **more,
    )


def episode(limit=20, rules=RULES, sample_index=0):
    return Episode(Prompt(4, np.array([2, 3]), "question"), sample_index, 9, limit, rules, encode)


def test_an_episode_by_hand():
    made = episode()
    first = made.next_request()
    assert first.prompt.token_ids.tolist() == [2, 3]
    assert first.limit == 20
    assert made.step_request is None
    made.add_response(response(first, [5, 6, 1], text="one"))
    assert made.next_request() is None and made.step_request.responses == ("one",)
    made.add_reply(ok("ab", reward=0.25))
    second = made.next_request()
    assert second.prompt.token_ids.tolist() == [2, 3, 5, 6, 1, 10, 11] and second.limit == 15
    made.add_response(response(second, [7, 1], text="two"))
    assert made.step_request.responses == ("one", "two") and not made.over
    made.add_reply(ok("unread", reward=1.0, done=True))
    assert made.over and made.next_request() is None and made.step_request is None
    sample = made.sample()
    sample.check()
    assert sample.tokens.tolist() == [2, 3, 5, 6, 1, 10, 11, 7, 1] and sample.prompt_length == 2
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert sample.rollout_log_probs.tolist() == [-1, -2, -3, 0, 0, -1, -2]
    assert spans(sample) == [Span(0, 3, 0.25), Span(5, 7, 1.0)]
    assert (sample.reward, sample.text, sample.finish_reason) == (1.25, "oneabtwo", "stop")
    assert (sample.prompt_index, sample.sample_index, sample.token_versions) == (4, 0, None)
    assert sample.routed_experts is None and FAILURE not in sample.metadata


def test_draws_are_a_function_of_prompt_sample_and_turn():
    numbers = [request_index(p, s, t) for p in range(20) for s in range(20) for t in range(20)]
    assert len(set(numbers)) == 8000 and 0 <= min(numbers) and max(numbers) < 2**62
    made = episode(sample_index=3)
    request = made.next_request()
    assert request.prompt.index == request_index(4, 3, 0)
    made.add_response(response(request, [1]))
    made.add_reply(ok("a"))
    assert made.next_request().prompt.index == request_index(4, 3, 1)


@pytest.mark.parametrize(
    ("limit", "turn_limit", "replies", "finish", "length"),
    [
        (20, None, [ok("a"), ok("a"), ok("a")], "length", 3 + 1 + 3 + 1 + 3),  # max_turns
        (4, None, [ok("a")], "length", 3),  # no token would be left after the observation
        (5, None, [ok("a"), ok("a")], "length", 3 + 1 + 1),  # one is
        (20, 2, [ok("a"), ok(done=True)], "length", 2 + 1 + 2),  # each response is cut
        # The environment is content with a cut response: still cut.
        (2, None, [ok(done=True)], "length", 2),
        (3, None, [ok(done=True)], "stop", 3),
        (20, None, [ok("")] * 3, "length", 9),  # an observation of no token
    ],
)
def test_limits(limit, turn_limit, replies, finish, length):
    made = episode(limit, replace(RULES, max_turn_length=turn_limit))
    for reply in replies:
        request = made.next_request()
        made.add_response(response(request, [5, 6, 1]))  # three tokens, for any request
        made.add_reply(reply)
    sample = made.sample()
    sample.check()
    assert (sample.finish_reason, sample.response_length) == (finish, length)
    assert spans(sample)[-1].end == length  # it ends with a response


def test_a_failed_environment_leaves_no_reward():
    made = episode()
    made.add_response(response(made.next_request(), [5, 1]))
    made.add_reply(ok("a", reward=1.0))
    made.add_response(response(made.next_request(), [6, 1]))
    made.add_reply(("timeout", None, "no result after 1 s"))
    sample = made.sample()
    assert made.over
    assert np.isnan(sample.reward)
    assert sample.metadata[FAILURE] == "timeout: no result after 1 s"
    assert sample.response_length == 5 and [span.reward for span in spans(sample)] == [1.0, 0.0]


def test_an_aborted_response_ends_the_episode():
    made = episode()
    made.add_response(response(made.next_request(), [5], finish="abort"))
    assert made.over and made.step_request is None
    sample = made.sample()
    assert sample.finish_reason == "abort"
    assert np.isnan(sample.reward)
    assert FAILURE not in sample.metadata


def test_versions_are_merged():
    made = episode()
    ids = np.array([4, 5, 5], dtype=np.int32)
    made.add_response(response(made.next_request(), [5, 6, 1], version=4, token_versions=ids))
    made.add_reply(ok("ab"))
    made.add_response(response(made.next_request(), [6, 1], version=6))
    made.add_reply(ok(done=True))
    sample = made.sample()
    sample.check()
    assert sample.token_versions.tolist() == [4, 5, 5, 5, 5, 6, 6] and sample.weight_version == 4
    single_turn = episode()
    single_turn.add_response(response(single_turn.next_request(), [6, 1], version=6))
    single_turn.add_reply(ok(done=True))
    assert single_turn.sample().token_versions is None and single_turn.sample().weight_version == 6


def rows(start, count):
    return np.arange(start, start + count, dtype=np.uint8)[:, None, None]


def test_routes_are_those_of_the_call_that_fed_a_token_first():
    made = episode()
    # 2 + 3 - 1 positions.
    made.add_response(response(made.next_request(), [5, 6, 1], routed_experts=rows(0, 4)))
    made.add_reply(ok("ab"))
    missing = np.zeros(8, bool)
    missing[[0, 5]] = True
    second = response(
        made.next_request(), [7, 1], routed_experts=rows(100, 8), missing_routes=missing
    )
    made.add_response(second)
    made.add_reply(ok(done=True))
    sample = made.sample()
    sample.check()
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    # Row 0 was known already.
    assert sample.missing_routes.tolist() == [False] * 5 + [True] + [False] * 2


def test_episodes_do_not_depend_on_their_company():
    engine, _ = engine_and_reference()
    rules = EpisodeRules(3, 60, max_turn_length=8)
    sampling = SamplingParams(3, 40)
    questions = prompts(6)
    playing = EpisodeEngine(engine, Depends(), encode, rules)
    cut = EpisodeEngine(engine_and_reference(max_batch=3)[0], Depends(), encode, rules)
    whole = playing.generate(questions, sampling, seed=5)
    for other in (
        cut.generate(questions, sampling, seed=5),
        [
            sample
            for question in questions
            for sample in playing.generate([question], sampling, seed=5)
        ],
    ):
        for a, b in zip(other, whole, strict=True):
            np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
            assert_same(replace(a, rollout_log_probs=b.rollout_log_probs), b)
    again = playing.generate(questions, sampling, seed=6)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(again, whole, strict=True))


def test_the_text_of_a_response_that_is_cut_off_is_that_of_its_tokens():
    """A round generates up to the largest limit of its episodes; an environment gets what the
    sample holds.
    """
    rules = EpisodeRules(max_turns=3, max_length=60, max_turn_length=2)

    def decode(ids):
        return "".join(chr(ord("a") + token - 10) for token in ids)

    made = Episode(Prompt(4, np.array([2, 3]), "question"), 0, 9, 20, rules, encode, decode)
    made.add_response(response(made.next_request(), [10, 11, 12], text="abc"))
    assert made.step_request.responses == ("ab",)
    made.add_reply(ok("d"))
    # Not cut: the engine's text, without its end.
    made.add_response(response(made.next_request(), [13, 1], text="d"))
    made.add_reply(ok(done=True))
    assert made.sample().text == "abdd" and made.sample().response_length == 5


def test_an_engine_that_breaks_its_promise_is_named():
    class Short:
        def generate(self, questions, sampling, *, seed):
            return []

    with pytest.raises(EngineError, match="the engine gave 0 samples for 4 prompts x 1"):
        EpisodeEngine(Short(), Depends(), encode, RULES).generate(
            prompts(2), SamplingParams(2, 9), seed=0
        )
