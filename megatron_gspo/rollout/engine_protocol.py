"""The protocol of inference engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError

if TYPE_CHECKING:  # the process that hosts agents calls servers, and has no torch
    from torch import Tensor


@runtime_checkable
class RolloutEngine(Protocol):
    """An inference engine as the training loop sees it."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """`sampling.n_samples_per_prompt` samples per prompt, prompt-major: all samples of
        prompts[0], then of prompts[1], ...

        The draw of response token t of (prompt_index, sample_index) depends on (seed, prompt_index,
        sample_index, t) alone, not on the batch, the rank or the order of the prompts.

        Of each sample: `rollout_log_probs[j]` is the natural log of the probability of response
        token j given all tokens before it, under softmax(logits / scoring_temperature) over the
        whole vocabulary: after temperature, before top-k and top-p (so that it compares with a
        training engine's log-probs). None where the engine has none. The end token is part of the
        response. `loss_mask` is True for every token of a single-turn response. `finish_reason` is
        "stop" (end token), "length" (max_response_length reached) or "abort". `weight_version` is
        that of the last `update_weights`. `routed_experts` where the engine reports them, else
        None: row p holds the experts that input position p was sent to when it was fed, as
        `routing_replay.routes.as_routes` makes them (with `missing_routes`) of an array of any
        integer type. `reward` stays NaN.

        Raises ValueError (one line) for a prompt or parameters that the engine can't serve.
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take the weights from a stream of (Hugging Face checkpoint name, full tensor).

        Every engine reads the stream to its end, also if it has no use for it: producing it may be
        collective.

        Raises ValueError (one line, naming the tensor) for a missing, repeated, unknown or
        wrong-shape one.
        """
        ...

    def pause(self) -> None:
        """Finish or stop what is being generated; `generate` isn't called until `resume`."""
        ...

    def resume(self) -> None:
        """Undo `pause`."""
        ...

    def close(self) -> None:
        """Free everything the engine holds. Calling it twice is fine."""
        ...


def too_many_ids(max_support: int) -> EngineError:
    """What every engine raises where more ids than `SamplingParams.max_support` could be drawn."""
    return EngineError(
        f"rollout.max_support = {max_support}: more ids could be drawn at a token; raise it, lower"
        " rollout.top_p or rollout.top_k, or raise rollout.min_p"
    )


def end_tokens(
    configured: int | Sequence[int] | None,
    tokenizer: object | None,
    vocab_size: int,
    *,
    given: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The tokens that end a response, ascending: `given`, or else the model's configured ones and
    the tokenizer's together.

    configured: eos_token_id of the generation config, else of the config. Raises ValueError where
    there is none, or one outside of the vocabulary.
    """
    end_ids: set[int] = set(given or ())
    if given is None:
        for ids in (configured, getattr(tokenizer, "eos_token_id", None)):
            end_ids.update([ids] if isinstance(ids, int) else ids or [])
    if not end_ids:
        raise ValueError("no end token in the configs or the tokenizer: pass eos_token_ids")
    if not 0 <= min(end_ids) <= max(end_ids) < vocab_size:
        raise ValueError(
            f"eos_token_ids={sorted(end_ids)}: ids must lie in the vocabulary of {vocab_size}"
        )
    return tuple(sorted(end_ids))
