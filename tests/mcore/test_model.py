"""The Megatron model that a Hugging Face config becomes, and the forward steps around it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ModelConfig, ParallelConfig
from megatron_gspo.data.packing import PackedBatch, count_trained, pack
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.forward_step import hidden_states, log_prob_forward_step, policy_forward_step, token_log_probs
from megatron_gspo.mcore.hf_weights import load_weights
from megatron_gspo.mcore.layers import RMSNorm
from megatron_gspo.mcore.model import build_model, transformer_config
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.model_shape import padded_vocab_size
from tests.equivalence.cases import make_samples
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model, tiny_config


def shape_of(kind: str = "moe", **overrides: object) -> Any:
    return family_of(tiny_config(kind, **overrides).to_dict())[1]


def test_reinforcement_learning_sets_the_router():
    config = transformer_config(shape_of(), parallel(), model_config())
    assert config.moe_router_load_balancing_type == "none" and config.moe_aux_loss_coeff == 0.0
    assert config.moe_router_dtype == "fp32" and config.moe_router_score_function == "softmax"
    assert config.moe_expert_capacity_factor is None, "dropless"
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 2, 16)
    assert not config.calculate_per_token_loss
    assert config.hidden_dropout == config.attention_dropout == 0.0


@pytest.mark.parametrize("normalised", [True, False])
def test_softmax_comes_before_the_choice_where_its_values_are_not_normalised(normalised):
    config = transformer_config(shape_of(norm_topk_prob=normalised), parallel(), model_config())
    assert config.moe_router_pre_softmax is not normalised


def test_layers_without_experts_are_dense():
    config = transformer_config(shape_of(mlp_only_layers=[1], decoder_sparse_step=1), parallel(), model_config())
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert transformer_config(shape_of("dense"), parallel(), model_config()).num_moe_experts is None


def test_recompute_settings():
    def config(**settings: Any) -> Any:
        return transformer_config(shape_of(), parallel(), model_config(**settings))

    assert config().recompute_granularity is None
    assert config(recompute_granularity="selective").recompute_granularity == "selective"
    full = config(recompute_granularity="full", recompute_num_layers=2)
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 2)


def test_sequence_parallelism_follows_tensor_parallelism_unless_told():
    dense = shape_of("dense")
    assert transformer_config(dense, parallel(tensor=2), model_config()).sequence_parallel
    assert not transformer_config(dense, parallel(), model_config()).sequence_parallel
    assert not transformer_config(dense, parallel(tensor=2, sequence_parallel=False), model_config()).sequence_parallel


def test_precision():
    config = transformer_config(shape_of(), parallel(), model_config(dtype="bfloat16"))
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.moe_router_dtype == "fp32"


def test_sent_tensors_are_freed_only_where_the_schedule_waits_for_the_send(monkeypatch):
    settings = model_config(implementation="torch")
    plain, interleaved = parallel(pipeline=2), parallel(pipeline=2, virtual_pipeline=2)
    for cuda, layout, freed in [(False, plain, False), (True, plain, True), (True, interleaved, False)]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert transformer_config(shape_of("dense"), layout, settings).deallocate_pipeline_outputs is freed


def test_norms_carry_the_mark_of_sequence_parallelism():
    for marked in (True, False):
        config = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=True, sequence_parallel=marked)
        norm = RMSNorm(config, 8)
        assert norm.weight.sequence_parallel is marked


def test_vocabulary_is_padded_to_the_tensor_parallel_size():
    assert [padded_vocab_size(shape_of(vocab_size=95), size) for size in (1, 2, 3, 8)] == [95, 96, 96, 96]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the setting may be possible")
def test_transformer_engine_is_refused_where_it_is_absent():
    with pytest.raises(ValueError, match="model.implementation=transformer_engine"):
        transformer_config(shape_of(), parallel(), model_config(implementation="transformer_engine"))


def loaded(path: str, layout: ParallelConfig, settings: ModelConfig | None = None) -> tuple[Any, ProcessGroups]:
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
    return model(input_ids=batch.tokens[None], position_ids=batch.position_ids[None], attention_mask=None,
                 packed_seq_params=sequences)


def fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def around_the_model(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Marks and output layer of a tensor-parallel model, what it returns, and the refusals of its forward step."""
    model, groups = loaded(path, parallel(tensor=2))
    unmarked = [name for name, parameter in model.named_parameters()
                if "norm" in name and not getattr(parameter, "sequence_parallel", False)]
    batch = batch_of(2)
    whole = logits_of(model, batch, groups)
    hidden = hidden_states(model, batch, groups)
    log_probs, _ = token_log_probs(model, hidden, batch, groups, temperature=1.0, vocab_size=95, with_entropy=False)
    restored = "forward" not in vars(model.output_layer)
    hook = model.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        hidden_states(model, batch, groups)
    hook.remove()
    restored_after_error = "forward" not in vars(model.output_layer)
    same = torch.equal(logits_of(model, batch, groups), whole)

    messages = []
    model.config.calculate_per_token_loss = True
    with pytest.raises(ValueError) as caught:
        policy_forward_step(preset("gspo"), num_microbatches=1, groups=groups)(iter([batch]), model)
    messages.append(str(caught.value))
    model.config.calculate_per_token_loss = False
    for step in (policy_forward_step(preset("gspo"), num_microbatches=3, groups=groups, vocab_size=95),
                 policy_forward_step(preset("gspo"), num_microbatches=3, vocab_size=95)):  # groups of Megatron's state
        output, loss_function = step(iter([batch]), model)
        scaled, reported = loss_function(output)
        messages.append(float(scaled / reported["metrics"]["loss"]))
    step = log_prob_forward_step(groups, temperature=1.0, vocab_size=95, with_entropy=True)
    output, collect = step(iter([batch]), model)
    found, entropy = collect(output)
    return {"unmarked": unmarked, "hidden": hidden.shape, "logits": whole, "log_probs": log_probs,
            "labels": batch.labels, "restored": (restored, restored_after_error, same),
            "messages": messages, "collected": (found, entropy)}


def outside_of_sequence_parallelism(rank: int, world_size: int, path: str) -> list[str]:
    model, _ = loaded(path, parallel(tensor=2, sequence_parallel=False), model_config())
    return [name for name, parameter in model.named_parameters() if getattr(parameter, "sequence_parallel", False)]


def both(rank: int, world_size: int, moe: str, dense: str) -> tuple[dict[str, Any], list[str]]:
    return around_the_model(rank, world_size, moe), outside_of_sequence_parallelism(rank, world_size, dense)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[list[tuple[dict[str, Any], list[str]]]]:
    folder = tmp_path_factory.mktemp("models")
    moe, dense = save_tiny_model(folder / "moe", vocab_size=95), save_tiny_model(folder / "dense", "dense")
    yield run_distributed(both, 2, moe, dense, timeout=60)


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
    for found, _ in ranks:
        tokens = expected.shape[0]
        assert found["hidden"] == (1, tokens // 2, 32), "split over the ranks by sequence parallelism"
        chosen = expected[torch.arange(tokens), found["labels"]]
        assert torch.allclose(found["log_probs"].double(), chosen, atol=1e-5, rtol=0)
        collected, entropy = found["collected"]
        assert torch.equal(collected, found["log_probs"])
        assert torch.allclose(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)


def test_per_token_loss_is_refused_and_the_share_is_scaled_once(ranks):
    for found, _ in ranks:
        assert "calculate_per_token_loss=True" in found["messages"][0]
        assert found["messages"][1:] == pytest.approx([3.0, 3.0]), "num_microbatches * data-parallel size (1)"
