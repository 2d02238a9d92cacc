"""Checks of the samples of any engine, made once, where they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError


def check_samples(
    samples: object,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    vocab_size: int | None = None,
) -> None:
    """Raise EngineError unless `samples` are what `RolloutEngine.generate` promises for these
    prompts.

    Number, order, shapes, dtypes and lengths; the prompt as it was given, but of an agent's run; ids below vocab_size
    (None: not checked); log-probs of trained tokens finite and at most 0. A response of no token is
    accepted: it has nothing to train on and is counted later. About 20 us a sample.
    """
    n = sampling.n_samples_per_prompt
    wanted = len(prompts) * n
    if not isinstance(samples, Sequence) or len(samples) != wanted:
        count = len(samples) if isinstance(samples, Sequence) else type(samples).__name__
        raise EngineError(
            f"the engine gave {count} samples for {len(prompts)} prompts x {n}; give {wanted}"
        )
    for position, sample in enumerate(samples):
        fault = _fault(sample, prompts[position // n], position % n, sampling, vocab_size)
        if fault:
            raise EngineError(f"the engine's {fault}")


def _fault(
    sample: object, prompt: Prompt, number: int, sampling: SamplingParams, vocab_size: int | None
) -> str:
    where = f"sample {prompt.index}/{number}"
    if not isinstance(sample, Sample):
        return f"{where} is a {type(sample).__name__}; give a Sample"
    if (sample.prompt_index, sample.sample_index) != (prompt.index, number):
        return (
            f"{where} is {sample.prompt_index}/{sample.sample_index}; give all samples of a prompt"
            " together, in the order of the prompts"
        )
    try:
        sample.check()
    except (ValueError, TypeError) as error:
        return str(error)
    # An agent writes the prompts of its calls, and a run has limits of its own.
    is_run = sample.row_lengths is not None
    if not is_run and not np.array_equal(sample.tokens[: sample.prompt_length], prompt.token_ids):
        return (
            f"{where}: tokens does not begin with the prompt's {prompt.length} token ids; give them"
            " as they are"
        )
    if not is_run and sample.response_length > sampling.max_response_length:
        limit = sampling.max_response_length
        return (
            f"{where}: tokens has {sample.response_length} of the response; max_response_length is"
            f" {limit}"
        )
    if vocab_size is not None and sample.tokens.max() >= vocab_size:
        largest = sample.tokens.max()
        return (
            f"{where}: tokens has the id {largest}; the model's vocabulary ends at {vocab_size - 1}"
        )
    for name in ("rollout_top_ids", "support_ids"):
        ids = getattr(sample, name)
        if vocab_size is not None and ids is not None and ids.max(initial=0) >= vocab_size:
            return (
                f"{where}: {name} has the id {ids.max()}; the model's vocabulary ends at"
                f" {vocab_size - 1}"
            )
    return ""
