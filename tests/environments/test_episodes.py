"""Episodes: what a finished one holds, token by token, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.agents.agent_host import RunRequest, single_error
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.run_samples import COUNTS, MESSAGES
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import Span, spans
from megatron_gspo.environments.environment import Environments, StepRequest, Turn
from megatron_gspo.errors import EngineError, InputError
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rewards.worker import Reply
from tests.support.agent_endpoint import BASH, TOKENIZER, call_text
from tests.support.random_samples import assert_same
from tests.support.reference_models import prompts
from tests.support.scripted_episodes import (
    Depends,
    engine_and_reference,
    host_of,
    ok,
    playing,
)
from tests.support.scripted_generator import ScriptedGenerator

LIMITS = RunLimits(max_calls=3, max_context=60)
QUESTION = Prompt(4, np.array([2, 3]), "question")


@dataclass
class Script:
    """An engine of one episode: its responses in turn, with log-probs -1, -2, ..."""

    responses: list[dict[str, Any]]
    seen: list[Prompt] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def generate(
        self, questions: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        [question] = questions
        self.seen.append(question)
        self.limits.append(sampling.max_response_length)
        response = dict(self.responses[len(self.seen) - 1])
        tokens = np.array(response.pop("ids")[: sampling.max_response_length], dtype=np.int64)
        return [
            Sample(
                prompt_index=question.index,
                sample_index=0,
                tokens=np.concatenate([question.token_ids, tokens]),
                prompt_length=question.length,
                loss_mask=np.ones(len(tokens), bool),
                rollout_log_probs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
                finish_reason=response.pop("finish", "stop"),
                weight_version=response.pop("version", 0),
                **response,
            )
        ]


@dataclass
class Replies:
    """Environments of one episode: their replies in turn."""

    replies: list[Reply]
    requests: list[StepRequest] = field(default_factory=list)

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]:
        [request] = requests
        if not request.responses:
            return [Reply("ok", {})]
        self.requests.append(request)
        return [self.replies[len(self.requests) - 1]]


def played(
    engine: Script, environments: Any, *, limit: int = 20, limits: RunLimits = LIMITS
) -> Sample:
    [sample] = playing(engine, environments, limits).generate(
        [QUESTION], SamplingParams(1, limit), seed=9
    )
    sample.check()
    return sample


def test_an_episode_by_hand() -> None:
    engine = Script([{"ids": [15, 16, 1]}, {"ids": [17, 1]}])
    environments = Replies([ok("ab", reward=0.25), ok("unread", reward=1.0, done=True)])
    sample = played(engine, environments)
    assert [prompt.token_ids.tolist() for prompt in engine.seen] == [
        [2, 3],
        [2, 3, 15, 16, 1, 10, 11],
    ]
    assert engine.limits == [20, 15]
    assert [request.responses for request in environments.requests] == [("fg",), ("fg", "h")]
    assert sample.tokens.tolist() == [2, 3, 15, 16, 1, 10, 11, 17, 1] and sample.prompt_length == 2
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == [-1, -2, -3, 0, 0, -1, -2]
    assert spans(sample) == [Span(0, 3, 0.25), Span(5, 7, 1.0)]
    assert (sample.reward, sample.text, sample.finish_reason) == (1.25, "fgabh", "stop")
    assert (sample.prompt_index, sample.sample_index, sample.token_versions) == (4, 0, None)
    assert sample.routed_experts is None
    assert sample.metadata.keys() == {"turns", COUNTS}


def test_draws_are_a_function_of_prompt_sample_and_turn() -> None:
    def draws(*questions: Prompt, seed: int) -> list[list[int]]:
        numbers: list[list[int]] = []

        class Numbers:
            def generate(self, asked, sampling, *, seed):
                numbers.append([prompt.index for prompt in asked])
                return [
                    sample
                    for prompt in asked
                    for sample in Script([{"ids": [1]}]).generate([prompt], sampling, seed=0)
                ]

        playing(Numbers(), Depends(turns=99), LIMITS).generate(
            questions, SamplingParams(4, 20), seed=seed
        )
        return numbers

    other = Prompt(5, QUESTION.token_ids, "question")
    numbers = draws(QUESTION, other, seed=9)
    flat = [number for turn in numbers for number in turn]
    assert [len(turn) for turn in numbers][:2] == [8, 8]
    assert len(set(flat)) == len(flat) and 0 <= min(flat) and max(flat) < 2**62
    assert numbers == draws(QUESTION, other, seed=9)
    assert set(draws(other, seed=9)[0]) < set(numbers[0])
    assert not set(draws(QUESTION, other, seed=8)[0]) & set(numbers[0])


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
def test_limits(
    limit: int, turn_limit: int | None, replies: list[Reply], finish: str, length: int
) -> None:
    class Whole(Script):
        """Says whether it has cut its response."""

        def generate(self, questions, sampling, *, seed):
            [sample] = super().generate(questions, sampling, seed=seed)
            is_cut = sample.response_length < 3
            return [replace(sample, finish_reason="length" if is_cut else "stop")]

    engine = Whole([{"ids": [15, 16, 1]}] * 3)
    environments = Replies(replies)
    sample = played(
        engine,
        environments,
        limit=limit,
        limits=replace(LIMITS, max_call_length=turn_limit or limit),
    )
    assert len(environments.requests) == len(replies)
    assert (sample.finish_reason, sample.response_length) == (finish, length)
    assert spans(sample)[-1].end == length  # it ends with a response


def test_a_failed_environment_leaves_no_reward() -> None:
    engine = Script([{"ids": [15, 1]}, {"ids": [16, 1]}])
    failure = Reply("timeout", message="no result after 1 s")
    sample = played(engine, Replies([ok("a", reward=1.0), failure]))
    assert np.isnan(sample.reward)
    assert sample.metadata[FAILURE] == "timeout: no result after 1 s"
    assert sample.response_length == 5 and [span.reward for span in spans(sample)] == [1.0, 0.0]


def test_an_environment_that_can_not_be_made_leaves_no_response() -> None:
    class Broken:
        def step(self, requests):
            return [Reply("error", message="ValueError: no tools")] * len(requests)

    sample = played(Script([]), Broken())
    assert np.isnan(sample.reward) and sample.response_length == 0
    assert sample.metadata[FAILURE] == "error: ValueError: no tools"


def test_an_aborted_response_ends_the_episode() -> None:
    environments = Replies([])
    sample = played(Script([{"ids": [5], "finish": "abort"}]), environments)
    assert environments.requests == []
    assert sample.finish_reason == "abort"
    assert np.isnan(sample.reward)
    assert FAILURE not in sample.metadata


def test_a_response_of_no_token_has_nothing_to_train() -> None:
    sample = played(Script([{"ids": []}]), Replies([ok(done=True, reward=1.0)]))
    assert sample.response_length == 0 and spans(sample) == [Span(0, 0, 1.0)]


def test_versions_are_merged() -> None:
    ids = np.array([4, 5, 5], dtype=np.int32)
    engine = Script(
        [
            {"ids": [15, 16, 1], "version": 4, "token_versions": ids},
            {"ids": [16, 1], "version": 6},
        ]
    )
    sample = played(engine, Replies([ok("ab"), ok(done=True)]))
    assert sample.token_versions is not None
    assert sample.token_versions.tolist() == [4, 5, 5, 5, 5, 6, 6] and sample.weight_version == 4
    sample = played(Script([{"ids": [16, 1], "version": 6}]), Replies([ok(done=True)]))
    assert sample.token_versions is None and sample.weight_version == 6


def rows(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint8)[:, None, None]


def test_routes_are_those_of_the_call_that_fed_a_token_first() -> None:
    missing = np.zeros(8, bool)
    missing[[0, 5]] = True
    engine = Script(
        [
            {"ids": [15, 16, 1], "routed_experts": rows(0, 4)},  # 2 + 3 - 1 positions
            {"ids": [17, 1], "routed_experts": rows(100, 8), "missing_routes": missing},
        ]
    )
    sample = played(engine, Replies([ok("ab"), ok(done=True)]))
    assert sample.routed_experts is not None and sample.missing_routes is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    # Row 0 was known already.
    assert sample.missing_routes.tolist() == [False] * 5 + [True] + [False] * 2


def test_episodes_do_not_depend_on_their_company() -> None:
    engine, _ = engine_and_reference()
    limits = RunLimits(max_calls=3, max_call_length=8, max_context=60)
    sampling = SamplingParams(3, 40)
    questions = prompts(6)
    episodes = playing(engine, Depends(), limits)
    cut = playing(engine_and_reference(max_batch=3)[0], Depends(), limits)
    whole = episodes.generate(questions, sampling, seed=5)
    for other in (
        cut.generate(questions, sampling, seed=5),
        [
            sample
            for question in questions
            for sample in episodes.generate([question], sampling, seed=5)
        ],
    ):
        for a, b in zip(other, whole, strict=True):
            np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
            assert_same(replace(a, rollout_log_probs=b.rollout_log_probs), b)
    again = episodes.generate(questions, sampling, seed=6)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(again, whole, strict=True))


def test_a_round_has_the_same_calls_whenever_steps_end() -> None:
    """All responses of a round are drawn together, in an order of their own."""

    class Batches:
        def __init__(self, engine):
            self.engine = engine
            self.batches: list[list[int]] = []

        def generate(self, questions, sampling, *, seed):
            self.batches.append([prompt.index for prompt in questions])
            return self.engine.generate(questions, sampling, seed=seed)

    limits = RunLimits(max_calls=3, max_call_length=8, max_context=60)
    recorded = []
    for questions in (prompts(6), prompts(6)[::-1]):
        engine = Batches(engine_and_reference()[0])
        playing(engine, Depends(), limits).generate(questions, SamplingParams(2, 40), seed=5)
        recorded.append(engine.batches)
    assert recorded[0] == recorded[1]
    assert len(recorded[0]) <= 2 * 3, "a round is one batch, or two of other limits"


def test_the_text_of_a_response_that_is_cut_off_is_that_of_its_tokens() -> None:
    """A round generates up to the largest limit of its episodes; an environment gets what the
    sample holds.
    """

    questions = [QUESTION, Prompt(5, np.arange(2, 9), "longer")]
    limits = []

    class Engine:
        def generate(self, asked, sampling, *, seed):
            limits.append(sampling.max_response_length)
            ids = list(range(10, 10 + sampling.max_response_length))
            return [
                sample
                for prompt in asked
                for sample in Script([{"ids": ids, "finish": "length"}]).generate(
                    [prompt], sampling, seed=seed
                )
            ]

    class Uneven:
        """The second episode has less room behind its observation."""

        def step(self, requests):
            return [self.reply(request) for request in requests]

        def reply(self, request):
            if not request.responses:
                return Reply("ok", {})
            if len(request.responses) == 2:
                seen[request.prompt.index] = request.responses
                return ok(done=True)
            return ok("xyz" if request.prompt.index == 5 else "x")

    seen: dict[int, tuple[str, ...]] = {}
    run_limits = RunLimits(max_calls=3, max_call_length=4, max_context=60)
    samples = playing(Engine(), Uneven(), run_limits).generate(
        questions, SamplingParams(1, 9), seed=0
    )
    assert limits == [4, 4], "the second round draws the calls of limits 4 and 2 together"
    assert seen == {4: ("abcd", "abcd"), 5: ("abcd", "ab")}
    assert [sample.text for sample in samples] == ["abcdxabcd", "abcdxyzab"]
    assert [sample.finish_reason for sample in samples] == ["length", "length"]


def test_an_engine_that_breaks_its_promise_is_named() -> None:
    class Short:
        def generate(self, questions, sampling, *, seed):
            return []

    with pytest.raises(EngineError, match="the engine gave 0 samples for 4 prompts x 1"):
        playing(Short(), Depends(), LIMITS).generate(prompts(2), SamplingParams(2, 9), seed=0)


# Environments with tools.

TASK = Prompt(4, np.array(TOKENIZER.encode("count the files")), "count the files")
TOOL_LIMITS = RunLimits(max_calls=4, max_context=2000)


class Shell:
    """Answers a call of the tool; a response without one ends the episode."""

    tools = [BASH]

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    def step(self, response: dict[str, Any]) -> Turn:
        self.received.append(response)
        if not response.get("tool_calls"):
            return Turn(reward=float(response["content"] == "3"), done=True)
        [call] = response["tool_calls"]
        command = json.loads(call["function"]["arguments"])["command"]
        return Turn(f"output of {command}", reward=0.125)


class InThisProcess:
    """The pool of one environment."""

    def __init__(self, environment: Any) -> None:
        self._environments = Environments(lambda prompt, **_: environment)

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]:
        return [self._environments.answer(request) for request in requests]


def converse(
    environment: Any, script: Any, limits: RunLimits = TOOL_LIMITS, *, branches: bool = True
) -> Sample:
    """An episode on a scripted generator, as on servers."""

    async def play() -> list[Sample]:
        host = host_of(
            InThisProcess(environment),
            limits,
            lambda: TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id]),
            branches=branches,
        )
        try:
            generator = ScriptedGenerator(TOKENIZER, script)
            return await host.samples([RunRequest(TASK, 0, seed=1)], generator, 1000)
        finally:
            await host.close()

    with single_error():
        [sample] = asyncio.run(play())
    sample.check()
    return sample


def test_tools_are_in_the_prompt_and_calls_are_parsed() -> None:
    def script(prompt: str, seed: int) -> str:
        if "<tool_response>" not in prompt:
            return "I look.\n" + call_text(command="ls")
        return "3"

    shell = Shell()
    sample = converse(shell, script)
    question = {"role": "user", "content": TASK.text}
    prompt = TOKENIZER.apply_chat_template(
        [question], tools=[BASH], tokenize=False, add_generation_prompt=True
    )
    assert sample.tokens[: sample.prompt_length].tolist() == TOKENIZER.encode(prompt)
    first, second = shell.received
    assert (first["role"], first["content"]) == ("assistant", "I look.")
    assert first["tool_calls"][0]["function"]["name"] == "bash"
    assert second == {"role": "assistant", "content": "3"}
    assert TOKENIZER.decode(sample.response_ids[~sample.loss_mask].tolist()) == (
        "\n<|im_start|>user\n<tool_response>\noutput of ls\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert sample.num_rows == 1 and [span.reward for span in spans(sample)] == [0.125, 1.0]
    assert sample.reward == 1.125 and sample.text == "3"
    messages = sample.metadata[MESSAGES]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.metadata[COUNTS]["calls"] == 2


def test_an_environment_that_edits_its_history_makes_a_branch() -> None:
    class Forgetful(Shell):
        """Sums up in place of its history."""

        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "count"},
        ]

        def step(self, response: dict[str, Any]) -> Turn:
            self.received.append(response)
            if len(self.received) == 2:
                return Turn(messages=[{"role": "user", "content": "so far: 2"}])
            return Turn("go on", done=len(self.received) == 3)

    sample = converse(Forgetful(), lambda prompt, seed: f"reply {seed % 100}")
    assert sample.num_rows == 2 and len(spans(sample)) == 3
    counts = sample.metadata[COUNTS]
    assert (counts["rows"], counts["breaks/new_thread"]) == (2, 1)
    assert sample.row_lengths is not None
    first = TOKENIZER.decode(sample.tokens[: sample.row_lengths[0]].tolist())
    second = TOKENIZER.decode(sample.tokens[sample.row_lengths[0] :].tolist())
    assert "be brief" in first and "go on" in first
    assert "so far: 2" in second and "be brief" not in second
    with pytest.raises(InputError, match="use an objective without a value model"):
        converse(Forgetful(), lambda prompt, seed: "reply", branches=False)


def test_what_a_conversation_can_not_be_leaves_no_reward() -> None:
    class Wrong(Shell):
        def __init__(self, turn: Turn) -> None:
            super().__init__()
            self.turn = turn

        def step(self, response: dict[str, Any]) -> Turn:
            return self.turn

    def failure(turn: Turn, reply: str = "hm") -> str:
        sample = converse(Wrong(turn), lambda prompt, seed: reply)
        assert np.isnan(sample.reward)
        return sample.metadata[FAILURE]

    two_calls = call_text(command="ls") + "\n" + call_text(command="pwd")
    assert failure(Turn("a"), two_calls).startswith("invalid: the response has 2 tool calls")
    unknown = [{"role": "judge", "content": "a"}]
    assert failure(Turn(unknown)) == "invalid: messages: role 'judge' is not known"
    assert "a list of messages" in failure(Turn(3))  # type: ignore[arg-type]
    assert "no list of JSON objects" in failure(Turn(messages=[{"a": object()}]))


def test_an_attribute_of_another_kind_leaves_an_environment_of_text() -> None:
    class Counts:
        def __init__(self) -> None:
            self.tools = {"count": len}
            self.messages = "mine"

        def step(self, response: str) -> Turn:
            return Turn(reward=float(len(response)), done=True)

    sample = played(Script([{"ids": [15, 16, 1]}]), InThisProcess(Counts()))
    assert sample.reward == 2.0


def test_a_conversation_ends_at_its_limits() -> None:
    sample = converse(Shell(), lambda prompt, seed: call_text(command="ls"))
    assert len(spans(sample)) == 4 and sample.finish_reason == "length"
    assert sample.reward == 0.5
    short = replace(TOOL_LIMITS, max_context=10)
    sample = converse(Shell(), lambda prompt, seed: "3", short)
    assert sample.response_length == 0
    assert "maximum context length is reached: 10 tokens" in sample.metadata[FAILURE]
