"""A scripted engine: returns the responses it was given. For tests of code that uses an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample


@dataclass(frozen=True)
class ScriptedResponse:
    """token_ids: the response, end token included; log_probs: as many floats, or None; rest as
    in Sample.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    finish_reason: str = "stop"
    text: str = ""


@dataclass
class ScriptedEngine:
    """`RolloutEngine` that answers from a script.

    script: prompt index -> its n responses, or a function (prompt, sample_index, seed) -> response.
    updates: what `update_weights` received, in order: (version, name -> clone of the tensor).
    calls: the pauses, resumes and closes, in order.
    """

    script: (
        Mapping[int, Sequence[ScriptedResponse]] | Callable[[Prompt, int, int], ScriptedResponse]
    )
    updates: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """The scripted responses, prompt-major. Raises ValueError if one is missing or too long."""
        n = sampling.n_samples_per_prompt
        return [self._sample(prompt, i, sampling, seed) for prompt in prompts for i in range(n)]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Keep a clone of every tensor in `updates`."""
        self.updates.append(
            (version, {name: tensor.detach().clone() for name, tensor in named_tensors})
        )

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")

    def _sample(
        self, prompt: Prompt, sample_index: int, sampling: SamplingParams, seed: int
    ) -> Sample:
        response = self._response(prompt, sample_index, seed)
        length = len(response.token_ids)
        where = f"prompt {prompt.index}, sample {sample_index}"
        if not 1 <= length <= sampling.max_response_length:
            raise ValueError(
                f"{where}: {length} scripted tokens; script 1 to {sampling.max_response_length}"
            )
        log_probs = None
        if response.log_probs is not None:
            log_probs = np.asarray(response.log_probs, dtype=np.float32)
        sample = Sample(
            prompt_index=prompt.index,
            sample_index=sample_index,
            tokens=np.concatenate(
                [prompt.token_ids, np.asarray(response.token_ids, dtype=np.int64)]
            ),
            prompt_length=len(prompt.token_ids),
            loss_mask=np.ones(length, dtype=bool),
            rollout_log_probs=log_probs,
            finish_reason=response.finish_reason,
            text=response.text,
            weight_version=self.updates[-1][0] if self.updates else 0,
        )
        sample.check()
        return sample

    def _response(self, prompt: Prompt, sample_index: int, seed: int) -> ScriptedResponse:
        if callable(self.script):
            return self.script(prompt, sample_index, seed)
        responses = self.script.get(prompt.index, ())
        if sample_index >= len(responses):
            raise ValueError(
                f"prompt {prompt.index} has {len(responses)} scripted responses: add sample"
                f" {sample_index}"
            )
        return responses[sample_index]
