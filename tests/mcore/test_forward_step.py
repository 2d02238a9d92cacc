"""The forward step around a tensor-parallel model: hidden states, log-probs, the scaled loss,
and refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ModelConfig, ParallelConfig
from megatron_gspo.data.packing import PackedBatch, count_trained, pack
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.forward_step import (
    hidden_states,
    log_prob_forward_step,
    policy_forward_step,
    token_log_probs,
)
from megatron_gspo.mcore.hf_weights import load_weights
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import family_of, read_config
from megatron_gspo.parallel.log_probs import LogProbOptions
from tests.equivalence.cases import make_samples
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def loaded(
    path: str, layout: ParallelConfig, settings: ModelConfig | None = None
) -> tuple[Any, ProcessGroups]:
    groups = groups_of(layout)
    family, shape = family_of(read_config(path))
    chunks = build_model(shape, layout, settings or model_config(), groups)
    load_weights(chunks, path, family, shape, groups)
    return chunks[0], groups


def batch_of(multiple: int) -> PackedBatch:
    samples = make_samples(count=3, vocab_size=95)
    for sample in samples:
        sample.old_log_probs = sample.advantages * 0 - 1.0
    sequences, tokens = count_trained(samples)
    return pack(samples, num_sequences=sequences, num_tokens=tokens, total_multiple=multiple)


def logits_of(model: Any, batch: PackedBatch, groups: ProcessGroups) -> Tensor:
    sequences = packed_sequences(batch.cu_seqlens, batch.max_seqlen, groups.cp, torch.device("cpu"))
    return model(
        input_ids=batch.tokens[None],
        position_ids=batch.position_ids[None],
        attention_mask=None,
        packed_seq_params=sequences,
    )


def fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def around_the_model(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Marks and output layer of a tensor-parallel model, what it returns, and the refusals of
    its forward step.
    """
    model, groups = loaded(path, parallel(tensor=2))
    unmarked = [
        name
        for name, parameter in model.named_parameters()
        if "norm" in name and not getattr(parameter, "sequence_parallel", False)
    ]
    batch = batch_of(2)
    whole = logits_of(model, batch, groups)
    hidden = hidden_states(model, batch, groups)
    log_probs, _ = token_log_probs(
        model, hidden, batch, groups, LogProbOptions(vocab_size=95), None
    )
    restored = "forward" not in vars(model.output_layer)
    hook = model.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        hidden_states(model, batch, groups)
    hook.remove()
    restored_after_error = "forward" not in vars(model.output_layer)
    same = torch.equal(logits_of(model, batch, groups), whole)

    messages = []
    trained = []
    model.config.calculate_per_token_loss = True
    with pytest.raises(ValueError) as caught:
        policy_forward_step(preset("gspo"), num_microbatches=1, groups=groups)(iter([batch]), model)
    messages.append(str(caught.value))
    model.config.calculate_per_token_loss = False
    # Groups of Megatron's state.
    for step in (
        policy_forward_step(preset("gspo"), num_microbatches=3, groups=groups, vocab_size=95),
        policy_forward_step(preset("gspo"), num_microbatches=3, vocab_size=95),
    ):
        output, loss_function = step(iter([batch]), model)
        scaled, reported = loss_function(output)
        messages.append(float(scaled / reported["metrics"]["loss"]))
        trained.append(reported["log_probs"])
    step = log_prob_forward_step(
        groups, num_microbatches=1, temperature=1.0, vocab_size=95, with_entropy=True
    )
    output, collect = step(iter([batch]), model)
    found, entropy = collect(output)
    return {
        "unmarked": unmarked,
        "hidden": hidden.shape,
        "logits": whole,
        "log_probs": log_probs,
        "batch": batch,
        "restored": (restored, restored_after_error, same),
        "messages": messages,
        "collected": (found, entropy),
        "trained": trained,
    }


def outside_of_sequence_parallelism(rank: int, world_size: int, path: str) -> list[str]:
    model, _ = loaded(path, parallel(tensor=2, sequence_parallel=False), model_config())
    return [
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "sequence_parallel", False)
    ]


def both(rank: int, world_size: int, moe: str, dense: str) -> tuple[dict[str, Any], list[str]]:
    return around_the_model(rank, world_size, moe), outside_of_sequence_parallelism(
        rank, world_size, dense
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[list[tuple[dict[str, Any], list[str]]]]:
    folder = tmp_path_factory.mktemp("models")
    moe = save_tiny_model(folder / "moe", vocab_size=95)
    dense = save_tiny_model(folder / "dense", "dense")
    yield run_distributed(both, 2, moe, dense)


def test_every_norm_of_a_sequence_parallel_model_is_marked(ranks):
    for found, marked_without in ranks:
        assert found["unmarked"] == []
        assert marked_without == []


def test_hidden_states_leave_the_output_layer_as_it_was(ranks):
    for found, _ in ranks:
        assert found["restored"] == (True, True, True)


def test_log_probs_from_hidden_states_are_those_of_the_logits(ranks):
    """The padded 96th row of the vocabulary is left out of the softmax."""
    logits = torch.cat([found["logits"] for found, _ in ranks], dim=-1).double()[0, :, :95]
    expected = torch.log_softmax(logits, dim=-1)
    entropies = -(expected.exp() * expected).sum(-1)
    for found, _ in ranks:
        tokens = expected.shape[0]
        batch = found["batch"]
        assert found["hidden"] == (
            1,
            tokens // 2,
            32,
        ), "split over the ranks by sequence parallelism"
        chosen = expected[torch.arange(tokens), batch.labels]
        responses = batch.response_mask.double()
        trained = batch.loss_mask.double()
        assert trained.sum() < responses.sum() < tokens
        collected, entropy = found["collected"]
        first, second = found["trained"]
        pairs = [
            (found["log_probs"], chosen),
            (collected, chosen * responses),
            (entropy, entropies * responses),
            (first, chosen * trained),
            (second, chosen * trained),
        ]
        for value, wanted in pairs:
            assert torch.allclose(value.double(), wanted, atol=1e-5, rtol=0)
            assert not value[wanted == 0].any()


def test_per_token_loss_is_refused_and_the_share_is_scaled_once(ranks):
    for found, _ in ranks:
        assert "calculate_per_token_loss=True" in found["messages"][0]
        assert found["messages"][1:] == pytest.approx([3.0, 3.0]), (
            "num_microbatches * data-parallel size (1)"
        )
