"""The forward step: from a packed micro-batch through Megatron's model to this rank's share of the
loss.

Scaling rule: each rank's loss is its *share*: summed over micro-batches, context- and data-parallel
ranks the shares give the objective. Megatron's schedule multiplies a two-value loss by ``cp /
num_microbatches`` and its DistributedDataParallel averages gradients over ``dp * cp`` ranks, so
``undo_averaging`` multiplies by ``num_microbatches * dp``. The equivalence tests prove the rule in
every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypedDict

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_gspo.algorithms import (
    Distillation,
    LossExtras,
    Objective,
    ScoreCentering,
    centering,
    divergence,
    mixed_divergence,
    over_support,
    policy_loss,
)
from megatron_gspo.data.packing import PackedBatch
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.micro_batch_inputs import POLICY_LOSS, InputReader, MicroBatchInputs
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device, current_groups
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.teacher_states import TeacherStates, kept_rows
from megatron_gspo.parallel.context_parallel import sum_over
from megatron_gspo.parallel.log_probs import (
    LogProbOptions,
    TeacherHead,
    divergence_from_hidden,
    log_probs_from_hidden,
    top_ids_from_hidden,
)
from megatron_gspo.parallel.scored_rows import ScoredRows


class LossFunction(Protocol):
    """What Megatron's schedule calls with the last stage's hidden states; see
    `forward_backward_func` of Megatron for the results that it takes."""

    def __call__(self, hidden: Tensor, **options: bool) -> object: ...


ForwardStep = Callable[[Iterator[PackedBatch], MegatronModule], tuple[Tensor, LossFunction]]


def unwrap(model: MegatronModule) -> GPTModel:
    """The ``GPTModel`` inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


@contextmanager
def _without_output_layer(model: GPTModel) -> Iterator[None]:
    """Within the context the model's last stage returns hidden states: the model computes no
    logits.
    """
    output_layer = getattr(model, "output_layer", None)
    if output_layer is None:
        yield
        return

    def forward(hidden: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        # The gradient comes back from GPTModel's transpose with another stride of the batch
        # dimension of 1, for which torch multiplies token by token with a frozen weight; these
        # views give it the usual one.
        return hidden.flatten(0, 1).unflatten(0, hidden.shape[:2]), None

    output_layer.forward = forward
    try:
        yield
    finally:
        del output_layer.forward


def hidden_states(
    model: MegatronModule,
    batch: PackedBatch,
    groups: ProcessGroups,
    routes: MicroBatchRoutes | None = None,
) -> Tensor:
    """Run one model chunk on a context-parallel shard of a micro-batch, with the micro-batch's
    ``routes``.

    Returns the next stage's input on all but the last stage; there the hidden states before the
    output layer, ``[1, t, hidden]`` (``t / tp`` tokens under sequence parallelism).
    """
    inner = unwrap(model)
    sequences = packed_sequences(
        batch.cu_seqlens.cpu(), batch.max_seqlen, groups.cp, compute_device()
    )
    sequences.routes = routes
    with _without_output_layer(inner):
        return model(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=sequences,
        )


def output_weight(model: MegatronModule) -> Tensor:
    """The rows of the vocabulary that multiply the last stage's hidden states on this rank."""
    inner = unwrap(model)
    tied = inner.share_embeddings_and_output_weights
    return inner.shared_embedding_or_output_weight() if tied else inner.output_layer.weight


def token_log_probs(
    model: MegatronModule,
    hidden: Tensor,
    labels: Tensor,
    groups: ProcessGroups,
    options: LogProbOptions,
    scored: ScoredRows | None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of a shard's labels ``[t]`` or ``[t, K]`` (and entropy ``[t]``) from the last
    stage's hidden states; float32, 0 where ``scored`` leaves a position out."""
    inner = unwrap(model)
    return log_probs_from_hidden(
        hidden.squeeze(0),
        output_weight(model),
        labels,
        options,
        tp_group=groups.tp,
        sequence_parallel=inner.config.sequence_parallel,
        scored=scored,
    )


@dataclass(frozen=True)
class TokenScores:
    """What the head gives of a shard's positions, 0 where they are not scored."""

    log_probs: Tensor
    """[t] of the labels, over the ids that could be drawn where the batch has them."""

    entropy: Tensor | None
    """[t]."""

    further: Sequence[Tensor] = ()
    """[t, K] of each of the ids that were asked for, over the vocabulary."""

    divergences: Tensor | None = None
    """[t, 2] of the policy p from a teacher t, KL(p || t) and KL(t || p)."""


def sampled_log_probs(
    model: MegatronModule,
    hidden: Tensor,
    inputs: MicroBatchInputs,
    groups: ProcessGroups,
    options: LogProbOptions,
    top_ids: Sequence[Tensor] = (),
    teacher: TeacherHead | None = None,
) -> TokenScores:
    """Log-probs of a shard's labels and of each of ``top_ids``, and divergences from a teacher."""
    batch = inputs.batch
    further = [*top_ids]
    if batch.support is not None:
        further.append(batch.support.clamp(min=0))
    labels = batch.labels
    if further:
        labels = torch.cat((labels[:, None], *further), dim=1)
    divergences = None
    if teacher is None:
        log_probs, entropy = token_log_probs(model, hidden, labels, groups, options, inputs.scored)
    else:
        log_probs, entropy, divergences = divergence_from_hidden(
            hidden.squeeze(0),
            output_weight(model),
            labels,
            teacher,
            options,
            tp_group=groups.tp,
            sequence_parallel=unwrap(model).config.sequence_parallel,
            scored=inputs.scored,
        )
    if not further:
        return TokenScores(log_probs, entropy, divergences=divergences)
    counts = [1, *(ids.shape[1] for ids in further)]
    sampled, *of_further = log_probs.split(counts, dim=1)
    log_probs = sampled[:, 0]
    if batch.support is not None:
        log_probs = over_support(log_probs, of_further.pop(), batch.support >= 0)
    return TokenScores(log_probs, entropy, of_further, divergences)


def policy_forward_step(
    objective: Objective,
    *,
    num_microbatches: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    groups: ProcessGroups | None = None,
    routing: Sequence[MicroBatchRoutes] | None = None,
    chunk_bytes: int | None = None,
    distillation: Distillation | None = None,
    teacher: TeacherStates | None = None,
    score_centering: ScoreCentering | None = None,
) -> ForwardStep:
    """A ``forward_step`` for Megatron's ``get_forward_backward_func()``: all that a training loop
    of your own needs.

    The data iterator yields ``PackedBatch`` micro-batches of one mini-batch, on the host,
    ``num_microbatches`` of them on each data-parallel rank. ``temperature`` is the one the
    responses were sampled at. ``vocab_size`` is the true size where the model's is padded.
    ``groups`` defaults to Megatron's parallel state. ``routing``: ``routes_of_mini_batch`` of this
    mini-batch; call ``check_uses`` of each after the schedule. ``chunk_bytes``: of
    ``LogProbOptions``. ``distillation``: the divergence from a teacher whose most likely ids the
    batches carry, or over the whole vocabulary from ``teacher``, whose states of this mini-batch are
    given; None without. ``score_centering``: how the loss weighs a token, of batches that
    carry the rollout engine's most likely ids; None without. The schedule returns, on the last
    stage and for each micro-batch, ``{"metrics": shares that add up, "log_probs": [t] of this
    shard, 0 where not trained}``.

    Raises ``ValueError`` for batches without ``old_log_probs`` where the objective has a ratio, and
    if the model's config sets ``calculate_per_token_loss``: the objective is already normalised by
    the global batch.
    """
    groups = groups or current_groups()
    options = LogProbOptions(
        temperature,
        vocab_size,
        with_entropy=objective.entropy_coef != 0.0,
        chunk_bytes=chunk_bytes,
    )
    reader = InputReader(
        groups, num_microbatches=num_microbatches, loss=POLICY_LOSS, routing=routing
    )

    def forward_step(
        batches: Iterator[PackedBatch], model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        if unwrap(model).config.calculate_per_token_loss:
            raise ValueError(
                "calculate_per_token_loss=True would divide the objective again; set it to False"
            )
        inputs = reader.next_inputs(batches, unwrap(model))
        output = hidden_states(model, inputs.batch, groups, inputs.routes)
        return output, partial(loss_function, inputs, model)

    def loss_function(
        inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor
    ) -> tuple[Tensor, PolicyLossOutput]:
        batch = inputs.batch
        both = (batch.teacher_top_ids, batch.rollout_top_ids)
        top_ids = [ids for ids in both if ids is not None]
        head = None if teacher is None else teacher.head(batch.micro_batch)
        scores = sampled_log_probs(model, hidden, inputs, groups, options, top_ids, head)
        log_probs = scores.log_probs
        of_top_ids = scores.further
        from_teacher = of_rollout = None
        if scores.divergences is not None:
            assert distillation is not None, "there is a teacher"
            from_teacher = mixed_divergence(distillation, *scores.divergences.unbind(1))
        if batch.teacher_top_log_probs is not None:
            assert distillation is not None, "the batch has a teacher's ids"
            from_teacher = divergence(distillation, of_top_ids[0], batch.teacher_top_log_probs)
        if batch.rollout_top_log_probs is not None:
            assert score_centering is not None, "the batch has the rollout engine's ids"
            of_rollout = centering(score_centering, of_top_ids[-1], batch.rollout_top_log_probs)
        extras = LossExtras(
            batch.num_segments,
            batch.ref_log_probs,
            scores.entropy,
            sum_over_context=sum_over(groups.cp),
            rollout_log_probs=batch.rollout_log_probs,
            divergence=from_teacher,
            centering=of_rollout,
            centering_advantages=batch.centering_advantages,
        )
        loss, metrics = policy_loss(
            objective,
            log_probs=log_probs,
            old_log_probs=batch.old_log_probs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            segment_ids=batch.segment_ids,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            extras=extras,
        )
        scaled = undo_averaging(loss, num_microbatches, groups)
        return scaled, {
            "metrics": {"loss": loss.detach(), **metrics},
            "log_probs": log_probs.detach().where(batch.loss_mask > 0, 0),
        }

    return forward_step


class PolicyLossOutput(TypedDict):
    """What a micro-batch adds to the results of an update."""

    metrics: dict[str, Tensor]
    """Shares that are combined over micro-batches and ranks."""

    log_probs: Tensor
    """[t] of this shard, 0 where not trained."""


def undo_averaging(loss: Tensor, num_microbatches: int, groups: ProcessGroups) -> Tensor:
    """A rank's share of the loss, as Megatron's schedule takes it: see the module."""
    return loss * (num_microbatches * groups.dp.size())


def log_prob_forward_step(
    groups: ProcessGroups,
    *,
    num_microbatches: int,
    temperature: float,
    vocab_size: int | None,
    with_entropy: bool,
    routing: Sequence[MicroBatchRoutes] | None = None,
    chunk_bytes: int | None = None,
) -> ForwardStep:
    """A loss-free step for a ``forward_only`` schedule with ``collect_non_loss_data``: old and
    reference policy.

    On the last stage the schedule returns ``(log_probs, entropy or None)`` of each micro-batch's
    shard: of every response token, trained or not, and 0 elsewhere.
    """
    options = LogProbOptions(temperature, vocab_size, with_entropy, chunk_bytes)
    reader = InputReader(groups, num_microbatches=num_microbatches, routing=routing)

    def forward_step(
        batches: Iterator[PackedBatch], model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        inputs = reader.next_inputs(batches, unwrap(model))
        output = hidden_states(model, inputs.batch, groups, inputs.routes)
        return output, partial(collect, inputs, model)

    def collect(
        inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        scores = sampled_log_probs(model, hidden, inputs, groups, options)
        return scores.log_probs, scores.entropy

    return forward_step


def teacher_forward_step(
    groups: ProcessGroups,
    *,
    num_microbatches: int,
    options: LogProbOptions,
    top_k: int,
    keeps_states: bool,
) -> ForwardStep:
    """Like ``log_prob_forward_step``, for a teacher. The schedule returns of each micro-batch's
    shard ``[t, 1 + 2 K]`` float32, the log-probs of the labels and of the teacher's K most likely ids,
    and these ids, which float32 holds up to 2^24; and with ``keeps_states`` the rows of
    `TeacherStates.hidden`."""
    reader = InputReader(groups, num_microbatches=num_microbatches)

    def forward_step(
        batches: Iterator[PackedBatch], model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        inputs = reader.next_inputs(batches, unwrap(model))
        output = hidden_states(model, inputs.batch, groups)
        return output, partial(collect, inputs, model)

    def collect(
        inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        rows = None
        if keeps_states:
            assert inputs.scored is not None, "this stage has the loss"
            rows = kept_rows(inputs.scored.select_own(hidden.squeeze(0)))
        labels = inputs.batch.labels[:, None]
        if top_k == 0:
            return token_log_probs(model, hidden, labels, groups, options, inputs.scored)[0], rows
        ids = top_ids_from_hidden(
            hidden.squeeze(0),
            output_weight(model),
            top_k,
            options,
            tp_group=groups.tp,
            sequence_parallel=unwrap(model).config.sequence_parallel,
            scored=inputs.scored,
        )
        every = torch.cat((labels, ids), dim=1)
        log_probs, _ = token_log_probs(model, hidden, every, groups, options, inputs.scored)
        return torch.cat((log_probs, ids.to(log_probs.dtype)), dim=1), rows

    return forward_step
