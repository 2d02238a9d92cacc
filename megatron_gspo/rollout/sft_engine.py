"""Reference answers as rollouts, so that a supervised cold start uses the same loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample


class DemonstrationEngine:
    """`RolloutEngine` whose response to a prompt is its reference answer and the end token.

    One sample a prompt, reward 1, no `rollout_log_probs`. An answer longer than
    `max_response_length` is cut there, without an end token, and finishes with "length", so that
    the filter for truncated responses sees it.
    """

    def __init__(self, encode: Callable[[str], list[int]], eos_token_id: int) -> None:
        """encode: text -> token ids, without special tokens."""
        self.encode = encode
        self.eos_token_id = eos_token_id
        self.weight_version = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """The reference answers.

        Raises ValueError for n other than 1 or a prompt without an answer.
        """
        if sampling.n_samples_per_prompt != 1:
            n = sampling.n_samples_per_prompt
            raise ValueError(
                f"n_samples_per_prompt={n}: a prompt has one reference answer; set it to 1"
            )
        return [self._sample(prompt, sampling.max_response_length) for prompt in prompts]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Read the stream to its end (producing it may be collective) and keep the version."""
        for _ in named_tensors:
            pass
        self.weight_version = version

    def pause(self) -> None:
        """Nothing runs between calls."""

    def resume(self) -> None:
        """Nothing was paused."""

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, prompt: Prompt, limit: int) -> Sample:
        if prompt.answer is None:
            raise ValueError(
                f"prompt {prompt.index} has no reference answer: give one to train on"
                " demonstrations"
            )
        response = np.asarray([*self.encode(prompt.answer), self.eos_token_id], dtype=np.int64)
        finish_reason = "stop" if len(response) <= limit else "length"
        response = response[:limit]
        return Sample(
            prompt_index=prompt.index,
            sample_index=0,
            tokens=np.concatenate([prompt.token_ids, response]),
            prompt_length=len(prompt.token_ids),
            loss_mask=np.ones(len(response), dtype=bool),
            rollout_log_probs=None,
            finish_reason=finish_reason,
            text=prompt.answer,
            weight_version=self.weight_version,
            reward=1.0,
        )
