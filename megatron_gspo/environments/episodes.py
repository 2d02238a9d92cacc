"""Episodes: response, environment step, response ... as one sample, over any engine.

An `Episode` is a small state machine: `next_request` says what to generate, `accept` takes it, `question` is what the
environment is to be asked, `hear` takes its reply. It knows neither engine nor pool, so that a driver may play all
episodes in rounds (`play_in_rounds`) or each at its own pace (`Overlapping`).

The sample's response is `response 1, observation 1, response 2, ...`: generated tokens stay as they were generated, an
observation is tokenised alone, without special tokens, and masked. It ends with a response.
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
from megatron_gspo.errors import EngineError
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


class Steps(Protocol):
    """The part of `EnvironmentPool` that the drivers use."""

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]: ...


@dataclass(frozen=True)
class EpisodeRules:
    """max_turns: responses of an episode. max_turn_length: tokens of a response; None: what is left of the sample's
    `max_response_length`. max_length: tokens, prompt included, that the engine can surely take."""

    max_turns: int
    max_length: int
    max_turn_length: int | None = None


@dataclass(frozen=True)
class Request:
    """One response to generate: to `prompt`, which is the episode so far, of at most `limit` tokens.

    `prompt.index` is a number of 62 bits that stands for (prompt, sample, turn), so that an engine's draws are a
    function of (seed, prompt, sample, turn, position).
    """

    prompt: Prompt
    limit: int


def request_index(prompt_index: int, sample_index: int, turn: int) -> int:
    """The number of 62 bits by which a `Request` draws."""
    high, low = np.random.SeedSequence([prompt_index, sample_index, turn]).generate_state(2).tolist()
    return (high << 32 | low) >> 2


class Episode:
    """One sample in the making. max_response_length: tokens of all its responses and observations."""

    def __init__(self, prompt: Prompt, sample_index: int, seed: int, max_response_length: int, rules: EpisodeRules,
                 encode: Encode) -> None:  # fmt: skip
        self.prompt, self.sample_index = prompt, sample_index
        self._seed = int(np.random.SeedSequence([seed, prompt.index, sample_index]).generate_state(1)[0])
        self._room, self._rules, self._encode = max_response_length, rules, encode
        self._parts: list[_Part] = []
        self._spans: list[Span] = []
        self._responses: list[str] = []
        self._asking = False
        self._finish: str | None = None
        self._failure = ""

    @property
    def over(self) -> bool:
        return self._finish is not None

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return sum(len(part.tokens) for part in self._parts)

    def next_request(self) -> Request | None:
        """What to generate next; None once the episode is over or while the environment is to be asked."""
        if self.over or self._asking:
            return None
        left = self._room - self.length
        limit = left if self._rules.max_turn_length is None else min(left, self._rules.max_turn_length)
        index = request_index(self.prompt.index, self.sample_index, len(self._responses))
        ids = np.concatenate([self.prompt.token_ids, *(part.tokens for part in self._parts)])
        return Request(Prompt(index, ids, self.prompt.text), limit)

    def accept(self, sample: Sample) -> None:
        """The engine's sample for the last request; what is beyond its limit is cut off."""
        request = self.next_request()
        assert request is not None, "accept answers a request"
        known = self.prompt.length + self._spans[-1].end - 1 if self._spans else 0
        part = _Part.of(sample, request.limit, known)
        start = self.length
        self._parts.append(part)
        self._spans.append(Span(start, start + len(part.tokens), 0.0))
        self._responses.append(part.text)
        if part.finish_reason == "abort":
            self._finish = "abort"
        self._asking = not self.over

    @property
    def question(self) -> StepRequest | None:
        """What the environment is to be asked; None where it isn't its turn."""
        if not self._asking:
            return None
        return StepRequest(self.prompt, self.sample_index, self._seed, tuple(self._responses))

    def hear(self, reply: Reply) -> None:
        """The environment's reply to `question`."""
        status, turn, message = reply
        self._asking = False
        last = self._parts[-1]
        if status != "ok":
            self._failure, self._finish = f"{status}: {message}", last.finish_reason
            return
        self._spans[-1] = replace(self._spans[-1], reward=turn["reward"])
        if turn["done"]:
            self._finish = last.finish_reason
        elif len(self._responses) == self._rules.max_turns:
            self._finish = "length"
        else:
            self._observe(turn["observation"])

    def _observe(self, text: str) -> None:
        """Append what the policy reads next, or end the episode where no token would be left to answer with."""
        ids = np.asarray(self._encode(text), dtype=np.int64)
        if self.length + len(ids) >= self._room:
            self._finish = "length"
            return
        version = int(self._parts[-1].versions[-1]) if len(self._parts[-1].versions) else self._parts[-1].version
        self._parts.append(_Part.observed(ids, text, version))

    def sample(self) -> Sample:
        """The finished episode: `reward` is the sum of its turns' (NaN where the environment failed or the engine
        aborted), `metadata` has the turns."""
        assert self._finish is not None, "sample of an episode that is over"
        parts = self._parts
        metadata = with_spans(self._spans)
        if self._failure:
            metadata[FAILURE] = self._failure
        scored = not self._failure and self._finish != "abort"
        versions = np.concatenate([part.versions for part in parts])
        mixed = any(part.has_versions for part in parts) or len(np.unique(versions)) > 1
        routes, missing = _join_routes(parts)
        scores = [part.log_probs for part in parts]
        return Sample(
            prompt_index=self.prompt.index,
            sample_index=self.sample_index,
            tokens=np.concatenate([self.prompt.token_ids, *(part.tokens for part in parts)]),
            prompt_length=self.prompt.length,
            loss_mask=np.concatenate([part.mask for part in parts]),
            rollout_log_probs=None if any(score is None for score in scores) else np.concatenate(scores),
            finish_reason=self._finish,
            text="".join(part.text for part in parts),
            weight_version=int(versions.min()) if len(versions) else parts[0].version,
            token_versions=versions if mixed else None,
            reward=sum(span.reward for span in self._spans) if scored else float("nan"),
            routed_experts=routes,
            missing_routes=missing,
            metadata=metadata,
        )


@dataclass(frozen=True)
class _Part:
    """A response or an observation, n tokens. routes, missing: rows of the input positions that were fed first while
    this response was generated; None for an observation, whose rows come with the next response."""

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
    def of(cls, sample: Sample, limit: int, known: int) -> _Part:
        """known: rows of routes that earlier responses gave; theirs are kept."""
        n = min(sample.response_length, limit)
        rows = slice(known, sample.prompt_length + n - 1)
        versions = sample.token_versions
        if versions is None:
            versions = np.full(sample.response_length, sample.weight_version, dtype=np.int32)
        routes, missing = sample.routed_experts, sample.missing_routes
        return cls(
            sample.response_ids[:n],
            sample.loss_mask[:n],
            None if sample.rollout_log_probs is None else sample.rollout_log_probs[:n],
            versions[:n],
            sample.weight_version,
            sample.token_versions is not None,
            sample.text,
            sample.finish_reason if n == sample.response_length else "length",
            None if routes is None else routes[rows],
            None if missing is None else missing[rows],
        )

    @classmethod
    def observed(cls, ids: np.ndarray, text: str, version: int) -> _Part:
        n = len(ids)
        versions = np.full(n, version, dtype=np.int32)
        zeros = np.zeros(n, dtype=np.float32)
        return cls(ids, np.zeros(n, dtype=bool), zeros, versions, version, False, text, "stop", observed_only=True)


def _join_routes(parts: Sequence[_Part]) -> tuple[np.ndarray | None, np.ndarray | None]:
    responses = [part for part in parts if not part.observed_only]
    if any(part.routes is None for part in responses):
        return None, None
    routes = np.concatenate([part.routes for part in responses])
    if all(part.missing is None for part in responses):
        return routes, None
    no = [np.zeros(len(part.routes), dtype=bool) if part.missing is None else part.missing for part in responses]
    return routes, np.concatenate(no)


def play_in_rounds(episodes: Sequence[Episode], engine: RolloutEngine, steps: Steps, sampling: SamplingParams, *,
                   seed: int, max_length: int) -> None:  # fmt: skip
    """Play all episodes to their ends; each round generates a response for, and asks the environments of, all that
    live."""
    while live := [episode for episode in episodes if not episode.over]:
        requests = [episode.next_request() for episode in live]
        for places, limit in batches(requests, max_length):
            prompts = [requests[i].prompt for i in places]
            asked = replace(sampling, n_samples_per_prompt=1, max_response_length=limit)
            samples = engine.generate(prompts, asked, seed=seed)
            check_samples(samples, prompts, asked)
            for i, sample in zip(places, samples, strict=True):
                live[i].accept(sample)
        ask(live, steps)


def batches(requests: Sequence[Request], max_length: int) -> list[tuple[list[int], int]]:
    """(positions, limit) of requests that are generated together: under the largest of their limits, which leaves none
    of them longer than max_length (or than its own limit does)."""
    waiting = sorted(range(len(requests)), key=lambda i: (-requests[i].limit, i))
    found = []
    while waiting:
        limit = requests[waiting[0]].limit
        fits = [
            i for i in waiting if requests[i].limit == limit or requests[i].prompt.length + limit <= max_length
        ]
        found.append((sorted(fits), limit))
        taken = set(fits)
        waiting = [i for i in waiting if i not in taken]
    return found


def ask(episodes: Sequence[Episode], steps: Steps) -> None:
    """Ask the environments of the episodes that wait for theirs."""
    waiting = [(episode, question) for episode in episodes if (question := episode.question) is not None]
    for (episode, _), reply in zip(waiting, steps.step([question for _, question in waiting]), strict=True):
        episode.hear(reply)


class Overlapping:
    """Episodes that each go on as soon as their own response is there.

    start: begins a request at an engine and returns its ticket. `feed` what has finished until `done`.
    """

    def __init__(self, episodes: Sequence[Episode], start: Callable[[Request], int], steps: Steps) -> None:
        self._start, self._steps = start, steps
        self._under_way: dict[int, Episode] = {}
        self._begin(episodes)

    @property
    def done(self) -> bool:
        return not self._under_way

    def feed(self, finished: Sequence[tuple[int, Sample]]) -> None:
        """(ticket, sample) of requests that have finished, in any order."""
        episodes = []
        for ticket, sample in finished:
            if ticket not in self._under_way:
                raise EngineError(f"the engine gave a sample for the request {ticket}, which is not under way")
            episodes.append(self._under_way.pop(ticket))
            episodes[-1].accept(sample)
        ask(episodes, self._steps)
        self._begin(episodes)

    def _begin(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            request = episode.next_request()
            if request is not None:
                self._under_way[self._start(request)] = episode


def make_episodes(prompts: Sequence[Prompt], sampling: SamplingParams, rules: EpisodeRules, encode: Encode, *,
                  seed: int) -> list[Episode]:  # fmt: skip
    """`sampling.n_samples_per_prompt` episodes a prompt, prompt-major."""
    longest = sampling.max_response_length
    n = sampling.n_samples_per_prompt
    return [Episode(prompt, i, seed, longest, rules, encode) for prompt in prompts for i in range(n)]
