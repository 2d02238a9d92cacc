"""Multi-turn episodes: response, environment step, response ... as one sample, with any engine.

An `Episode` is a state machine: `next_request` is the next response to generate and `add_response`
takes it; `step_request` is the next environment step and `add_reply` takes its result. It calls
neither an engine nor an environment: `run_in_rounds` generates for all episodes at once, and on
servers an `EpisodeGroup` advances each one separately.

The sample's response is `response 1, observation 1, response 2, ...` and ends with a response. The
token ids of a response are those that the engine generated. An observation is tokenised by itself,
without special tokens, and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import Span, with_spans
from megatron_gspo.environments.environment import StepRequest
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""
Decode = Callable[[list[int]], str]
"""Token ids of a response to its text."""


class Environments(Protocol):
    """What episodes need of an `EnvironmentPool`."""

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]: ...


@dataclass(frozen=True)
class EpisodeRules:
    """max_turns: responses of an episode. max_turn_length: tokens of a response; None: what is left
    of the sample's `max_response_length`. max_length: tokens of prompt and response that the engine
    supports."""

    max_turns: int
    max_length: int
    max_turn_length: int | None = None


@dataclass(frozen=True)
class Request:
    """A response to generate. prompt: the episode so far. limit: maximum number of tokens.

    `prompt.index` is a 62-bit hash of (prompt, sample, turn), so that an engine's draws depend on
    (seed, prompt, sample, turn, position) alone.
    """

    prompt: Prompt
    limit: int


def request_index(prompt_index: int, sample_index: int, turn: int) -> int:
    """The 62-bit `prompt.index` of a `Request`."""
    high, low = (
        np.random.SeedSequence([prompt_index, sample_index, turn]).generate_state(2).tolist()
    )
    return (high << 32 | low) >> 2


class Episode:
    """One unfinished sample. max_response_length: tokens of all its responses and observations.

    oldest_version: the oldest weight version among its responses' tokens, None without any.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        seed: int,
        max_response_length: int,
        rules: EpisodeRules,
        encode: Encode,
        decode: Decode | None = None,
    ) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.oldest_version: int | None = None
        self._seed = int(
            np.random.SeedSequence([seed, prompt.index, sample_index]).generate_state(1)[0]
        )
        self._room = max_response_length
        self._rules = rules
        self._encode = encode
        self._decode = decode
        self._segments: list[_Segment] = []
        self._spans: list[Span] = []
        self._responses: list[str] = []
        self._awaits_step = False
        self._finish: str | None = None
        self._failure = ""

    @property
    def over(self) -> bool:
        return self._finish is not None

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return sum(len(segment.tokens) for segment in self._segments)

    @property
    def generated_length(self) -> int:
        """Tokens of its responses so far."""
        return sum(span.end - span.start for span in self._spans)

    def next_request(self) -> Request | None:
        """The next response to generate; None if the episode is over or the environment's step
        is next.
        """
        if self.over or self._awaits_step:
            return None
        limit = self._room - self.length
        if self._rules.max_turn_length is not None:
            limit = min(limit, self._rules.max_turn_length)
        index = request_index(self.prompt.index, self.sample_index, len(self._responses))
        ids = np.concatenate([self.prompt.token_ids, *(s.tokens for s in self._segments)])
        return Request(Prompt(index, ids, self.prompt.text), limit)

    def add_response(self, sample: Sample) -> None:
        """Append the engine's sample for `next_request`. Tokens beyond the limit are cut off."""
        request = self.next_request()
        assert request is not None, "no response was requested"
        known_routes = self.prompt.length + self._spans[-1].end - 1 if self._spans else 0
        response = _Segment.of_response(sample, request.limit, known_routes)
        if len(response.tokens) < sample.response_length and self._decode is not None:
            response = replace(response, text=self._decode(response.tokens.tolist()))
        start = self.length
        self._segments.append(response)
        if len(response.versions):
            version = int(response.versions.min())
            is_older = self.oldest_version is None or version < self.oldest_version
            self.oldest_version = version if is_older else self.oldest_version
        self._spans.append(Span(start, start + len(response.tokens), 0.0))
        self._responses.append(response.text)
        if response.finish_reason == "abort":
            self._finish = "abort"
        self._awaits_step = not self.over

    @property
    def step_request(self) -> StepRequest | None:
        """The next environment step; None if a response is next or the episode is over."""
        if not self._awaits_step:
            return None
        return StepRequest(self.prompt, self.sample_index, self._seed, tuple(self._responses))

    def add_reply(self, reply: Reply) -> None:
        """Append the result of `step_request`."""
        status, turn, message = reply
        self._awaits_step = False
        last = self._segments[-1]
        if status != "ok":
            self._failure = f"{status}: {message}"
            self._finish = last.finish_reason
            return
        self._spans[-1] = replace(self._spans[-1], reward=turn["reward"])
        if turn["done"]:
            self._finish = last.finish_reason
        elif len(self._responses) == self._rules.max_turns:
            self._finish = "length"
        else:
            self._observe(turn["observation"])

    def _observe(self, text: str) -> None:
        """Append an observation, or end the episode if it leaves no room for a response."""
        ids = np.asarray(self._encode(text), dtype=np.int64)
        if self.length + len(ids) >= self._room:
            self._finish = "length"
            return
        last = self._segments[-1]
        version = int(last.versions[-1]) if len(last.versions) else last.version
        self._segments.append(_Segment.of_observation(ids, text, version))

    def sample(self) -> Sample:
        """The finished episode. `reward`: sum of the turns' rewards; NaN if the environment failed
        or the engine aborted. `metadata`: spans of the turns."""
        assert self._finish is not None, "the episode is not over"
        segments = self._segments
        metadata = with_spans(self._spans)
        if self._failure:
            metadata[FAILURE] = self._failure
        scored = not self._failure and self._finish != "abort"
        versions = np.concatenate([s.versions for s in segments])
        has_versions = any(s.has_versions for s in segments) or len(np.unique(versions)) > 1
        routes, missing = _join_routes(segments)
        log_probs = [s.log_probs for s in segments if s.log_probs is not None]
        return Sample(
            prompt_index=self.prompt.index,
            sample_index=self.sample_index,
            tokens=np.concatenate([self.prompt.token_ids, *(s.tokens for s in segments)]),
            prompt_length=self.prompt.length,
            loss_mask=np.concatenate([s.mask for s in segments]),
            rollout_log_probs=(
                np.concatenate(log_probs) if len(log_probs) == len(segments) else None
            ),
            finish_reason=self._finish,
            text="".join(s.text for s in segments),
            weight_version=int(versions.min()) if len(versions) else segments[0].version,
            token_versions=versions if has_versions else None,
            reward=sum(span.reward for span in self._spans) if scored else float("nan"),
            routed_experts=routes,
            missing_routes=missing,
            metadata=metadata,
        )


@dataclass(frozen=True)
class _Segment:
    """A response or an observation of n tokens.

    routes, missing: rows of the input positions that this response's request processed first; None
    for an observation, whose rows come with the next response.
    """

    tokens: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray | None
    versions: np.ndarray
    version: int
    has_versions: bool
    text: str
    finish_reason: str
    routes: np.ndarray | None = None
    missing: np.ndarray | None = None
    observed_only: bool = False

    @classmethod
    def of_response(cls, sample: Sample, limit: int, known_routes: int) -> _Segment:
        """The first `limit` tokens. known_routes: rows of routes from earlier responses, which are
        kept."""
        n = min(sample.response_length, limit)
        new_routes = slice(known_routes, sample.prompt_length + n - 1)
        versions = sample.token_versions
        if versions is None:
            versions = np.full(sample.response_length, sample.weight_version, dtype=np.int32)
        routes = sample.routed_experts
        missing = sample.missing_routes
        log_probs = sample.rollout_log_probs
        return cls(
            tokens=sample.response_ids[:n],
            mask=sample.loss_mask[:n],
            log_probs=None if log_probs is None else log_probs[:n],
            versions=versions[:n],
            version=sample.weight_version,
            has_versions=sample.token_versions is not None,
            text=sample.text,
            finish_reason=sample.finish_reason if n == sample.response_length else "length",
            routes=None if routes is None else routes[new_routes],
            missing=None if missing is None else missing[new_routes],
        )

    @classmethod
    def of_observation(cls, ids: np.ndarray, text: str, version: int) -> _Segment:
        """Tokens that are masked. version: of the weights that chose the response before."""
        return cls(
            tokens=ids,
            mask=np.zeros(len(ids), dtype=bool),
            log_probs=np.zeros(len(ids), dtype=np.float32),
            versions=np.full(len(ids), version, dtype=np.int32),
            version=version,
            has_versions=False,
            text=text,
            finish_reason="stop",
            observed_only=True,
        )


def _join_routes(segments: Sequence[_Segment]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The routes of all responses and which are missing; None where a response has none."""
    responses = [segment for segment in segments if not segment.observed_only]
    routes = [response.routes for response in responses if response.routes is not None]
    if len(routes) < len(responses):
        return None, None
    joined = np.concatenate(routes)
    if all(response.missing is None for response in responses):
        return joined, None
    missing = []
    for response, response_routes in zip(responses, routes, strict=True):
        if response.missing is None:
            missing.append(np.zeros(len(response_routes), dtype=np.bool_))
        else:
            missing.append(response.missing)
    return joined, np.concatenate(missing)


def run_in_rounds(
    episodes: Sequence[Episode],
    engine: RolloutEngine,
    environments: Environments,
    sampling: SamplingParams,
    *,
    seed: int,
    max_length: int,
) -> None:
    """Run all episodes to their end. Each round generates a response and steps the environment of
    every unfinished one."""
    while unfinished := [episode for episode in episodes if not episode.over]:
        requests = [
            request for episode in unfinished if (request := episode.next_request()) is not None
        ]
        assert len(requests) == len(unfinished)  # none awaits a step between rounds
        for indices, limit in batches(requests, max_length):
            prompts = [requests[i].prompt for i in indices]
            one_response = replace(sampling, n_samples_per_prompt=1, max_response_length=limit)
            samples = engine.generate(prompts, one_response, seed=seed)
            check_samples(samples, prompts, one_response)
            for i, sample in zip(indices, samples, strict=True):
                unfinished[i].add_response(sample)
        step_environments(unfinished, environments)


def batches(requests: Sequence[Request], max_length: int) -> list[tuple[list[int], int]]:
    """(indices, limit) of requests that are generated together.

    limit: the largest of their limits. No request exceeds max_length with it, except by its own
    limit.
    """
    waiting = sorted(range(len(requests)), key=lambda i: (-requests[i].limit, i))
    grouped = []
    while waiting:
        limit = requests[waiting[0]].limit
        fits = [
            i
            for i in waiting
            if requests[i].limit == limit or requests[i].prompt.length + limit <= max_length
        ]
        grouped.append((sorted(fits), limit))
        chosen = set(fits)
        waiting = [i for i in waiting if i not in chosen]
    return grouped


def step_environments(episodes: Sequence[Episode], environments: Environments) -> None:
    """Step the environments of the episodes whose step is next."""
    waiting: list[Episode] = []
    requests: list[StepRequest] = []
    for episode in episodes:
        request = episode.step_request
        if request is not None:
            waiting.append(episode)
            requests.append(request)
    replies = environments.step(requests)
    for episode, reply in zip(waiting, replies, strict=True):
        episode.add_reply(reply)


def make_episodes(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    rules: EpisodeRules,
    encode: Encode,
    *,
    seed: int,
    decode: Decode | None = None,
) -> list[Episode]:
    """`sampling.n_samples_per_prompt` episodes per prompt, prompt-major."""
    longest = sampling.max_response_length
    n = sampling.n_samples_per_prompt
    return [
        Episode(prompt, i, seed, longest, rules, encode, decode)
        for prompt in prompts
        for i in range(n)
    ]
