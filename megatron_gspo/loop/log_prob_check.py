"""Compares the servers' log-probs of some prompts with the trainer's, after a weight update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop.engines import log_servers
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.micro_batches import values_everywhere
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.models import read_config
from megatron_gspo.rollout.group_source import GroupSource

_PROMPTS = 4
_TOKENS = 256  # of a prompt: servers may hold the logits of all of a request's tokens at once

# Mean differences that rounding explains, in nats. Measured on random models, whose log-probs move
# more than those of trained ones: 6.6e-7 in float32, 0.032 in bfloat16, 0.17 with FP8 rollouts. A
# trainer in float32 may have servers in bfloat16.
ROUNDING = {"float32": 0.02, "bfloat16": 0.05}
QUANTIZED_ROUNDING = 0.2
# Log-probs of another model have nothing in common with the trainer's. They then differ by at least
# as much as the trainer's differ among themselves, for example where the server's output layer is
# random or zero.
UNRELATED = 0.5

# SGLang gives these an output layer of their own, also where config.json ties it to the embeddings.
_TIES_IGNORED = ("qwen2_moe", "qwen3_moe", "qwen3_next")


def check_log_probs(
    groups: GroupSource,
    policy: Policy,
    prompts: Sequence[Prompt],
    config: Config,
    version: int,
    timers: Timers,
    *,
    at_start: bool = False,
) -> dict[str, float]:
    """``log_prob_check/*``: each server's log-probs of the first prompts' tokens against the
    policy's. Empty where no check is due, without servers, and without prompts of two tokens.

    At the start and after the first update (``log_prob_check_at_start``) it raises
    `SharedEngineError` for a server that computes another model. Every ``log_prob_check_interval``
    updates it warns, or raises `SharedEngineError`, for a token's difference above
    ``log_prob_check_tolerance``.
    """
    servers = config.servers
    if not servers.is_set:
        return {}
    interval = servers.log_prob_check_interval
    compares_models = servers.log_prob_check_at_start and (at_start or version == 1)
    compares_tokens = interval > 0 and version % interval == 0
    if not compares_models and not compares_tokens:
        return {}
    samples = [
        as_sample(prompt) for prompt in islice((p for p in prompts if p.length > 1), _PROMPTS)
    ]
    if not samples:
        return {}
    with timers("log_prob_check"):
        theirs = groups.score([sample.tokens for sample in samples])
        if not theirs:  # no server answered, which is reported elsewhere
            return {}
        batch = TrainingBatch.of(samples)
        local_log_probs = compute_log_probs(
            policy, batch, config.training, temperature=1.0
        ).log_probs
        log_probs = values_everywhere(local_log_probs, policy.groups)
        ours = list(batch.responses.split(log_probs).values())
        mean, largest, server = compare(ours, theirs)
    if compares_models and (problem := other_model(ours, theirs, config)):
        raise SharedEngineError(f"weights {version}: {problem}")
    if compares_tokens and not largest <= servers.log_prob_check_tolerance:  # NaN too
        line = (
            f"weights {version}: the log-prob of a token differs by {largest:.3g} nats between the"
            f" trainer and server {server}, {servers.section}.log_prob_check_tolerance is"
            f" {servers.log_prob_check_tolerance:g}; compare model, dtype and weights of both"
        )
        if servers.log_prob_check_action == "stop":
            raise SharedEngineError(line)
        if dist.get_rank() == 0:
            log_servers(line)
    return {"log_prob_check/abs_diff": mean, "log_prob_check/abs_diff_max": largest}


def as_sample(prompt: Prompt) -> Sample:
    """The first tokens of a prompt.

    All but the first count as a response, so that they have log-probs.
    """
    tokens = prompt.token_ids[:_TOKENS]
    return Sample(prompt.index, 0, tokens, 1, np.ones(len(tokens) - 1, dtype=bool), None, "stop")


def compare(
    ours: Sequence[np.ndarray], theirs: Mapping[str, Sequence[np.ndarray]]
) -> tuple[float, float, str]:
    """(mean difference in nats over all servers, the largest one, its server).

    theirs: log-probs by server.
    """
    differences = absolute_differences(ours, theirs)
    largest = {url: float(values.max()) for url, values in differences.items()}
    worst = max(largest, key=lambda url: math.inf if math.isnan(largest[url]) else largest[url])
    total = sum(float(values.sum()) for values in differences.values())
    count = sum(map(len, differences.values()))
    return total / count, largest[worst], worst


def absolute_differences(
    ours: Sequence[np.ndarray], theirs: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, np.ndarray]:
    """By server, |ours - theirs| of all tokens, in nats."""
    return {
        url: np.concatenate([np.abs(a - b) for a, b in zip(ours, values, strict=True)])
        for url, values in theirs.items()
    }


def other_model(
    ours: Sequence[np.ndarray], theirs: Mapping[str, Sequence[np.ndarray]], config: Config
) -> str | None:
    """A line about the first server that computes another model than the trainer, with the fix;
    None if none does.
    """
    log_probs = np.concatenate(list(ours))
    spread = float(np.abs(log_probs - log_probs.mean()).mean())
    is_quantized = config.rollout.quantization.is_on
    rounding = QUANTIZED_ROUNDING if is_quantized else ROUNDING[config.model.dtype]
    limit = max(rounding, UNRELATED * spread)
    for url, differences in absolute_differences(ours, theirs).items():
        mean = float(differences.mean())
        if mean <= limit:  # False for NaN
            continue
        return (
            f"server {url} computes another model than the trainer: their log-probs of"
            f" {len(differences)} prompt tokens differ by {mean:.3g} nats on average, and rounding"
            f" explains {rounding:g}; {_advice(config)}"
        )
    return None


def _advice(config: Config) -> str:
    hf = read_config(config.model.path)
    model_type = str(hf.get("model_type"))
    if (
        config.rollout.engine == "sglang"
        and hf.get("tie_word_embeddings")
        and model_type in _TIES_IGNORED
    ):
        return (
            f"SGLang ignores tie_word_embeddings of {model_type} (sgl-project/sglang#19908): use"
            " rollout.engine: vllm, or untie the model as docs/sglang.md shows"
        )
    section = config.servers.section
    return (
        "compare config.json and arguments of the servers with model.path, or turn this check off"
        f" with {section}.log_prob_check_at_start: false"
    )
