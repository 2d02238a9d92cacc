"""Environments and engines for episodes with known outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.environments.episodes import Environments, EpisodeEngine, EpisodeHost
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from tests.support.reference_models import checkpoint, loaded_engine, moe_config, reference_model


def encode(text: str) -> list[int]:
    """Ids 10 .. 35 for letters."""
    return [10 + ord(letter) - ord("a") for letter in text]


def decode(ids: Sequence[int]) -> str:
    """The opposite of `encode`; other ids have no text."""
    return "".join(chr(ord("a") + token - 10) for token in ids if 10 <= token < 36)


def no_conversation():
    raise AssertionError("the environment has no tools")


def host_of(
    environments: Environments, limits: RunLimits, conversation=no_conversation, **options
) -> EpisodeHost:
    """Plays episodes. conversation: makes the rendering of environments with tools."""
    return EpisodeHost(environments, limits, encode, decode, conversation, **options)


def playing(engine, environments: Environments, limits: RunLimits) -> EpisodeEngine:
    """An engine of episodes over another one."""
    return EpisodeEngine(engine, host_of(environments, limits))


def ok(observation="", reward=0.0, done=False):
    return Reply("ok", {"observation": observation, "reward": reward, "done": done})


@dataclass
class Depends:
    """Environments whose turns are a function of (prompt, sample, seed, responses)."""

    turns: int = 3

    def step(self, requests):
        return [self.reply(r) for r in requests]

    def reply(self, r):
        if not r.responses:
            return Reply("ok", {})
        n = len(r.responses)
        letters = "abcdefg"[: 1 + (r.prompt.index + r.sample_index + n + r.seed) % 4]
        return ok(letters, float(n) / 2, n >= 1 + (r.prompt.index + r.sample_index) % self.turns)


def engine_and_reference(**settings) -> tuple[EmbeddedEngine, object]:
    reference = reference_model(moe_config())
    state = checkpoint(reference)
    ends = {"eos_token_ids": range(1, 6), "return_routed_experts": True}
    return loaded_engine(moe_config(), state, **ends, **settings), reference
