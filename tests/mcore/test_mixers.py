"""What Megatron is configured with and what takes the place of its modules, by a layer's mixer."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_gspo.mcore.attention import PackedAttention
from megatron_gspo.mcore.gated_delta_net.layer import GatedDeltaNet
from megatron_gspo.mcore.joint_norms import JointNormAttention
from megatron_gspo.mcore.mixers import MIXERS, mixer_options
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.mcore.sink_attention import SinkAttention
from megatron_gspo.models.model_shape import DeltaNetSizes
from tests.support.model_shapes import dense_shape


def test_attention():
    assert mixer_options(dense_shape(attention_bias=True)) == dict(
        num_query_groups=1,
        kv_channels=4,
        qk_layernorm=True,
        add_qkv_bias=True,
        attention_output_gate=False,
    )
    for norms in (True, False):
        spec = SimpleNamespace(
            submodules=SimpleNamespace(core_attention=None, q_layernorm=None, k_layernorm=None)
        )
        config = SimpleNamespace(qk_layernorm=norms)
        shape = dense_shape(query_key_norms=norms)
        found = MIXERS["attention"].place(spec, config, shape).submodules
        assert found.core_attention is PackedAttention
        sinks = MIXERS["sink_attention"].place(spec, config, shape).submodules
        assert sinks.core_attention is SinkAttention
        assert found.q_layernorm is found.k_layernorm is (RMSNorm if norms else None)


def test_joint_norms_are_not_megatrons_norms_of_one_head():
    shape = dense_shape(mixers=("joint_norm_attention",) * 2)
    # With it Megatron would sum their gradients over the ranks.
    assert mixer_options(shape)["qk_layernorm"] is False
    spec = SimpleNamespace(
        module=None, submodules=SimpleNamespace(core_attention=None, q_layernorm=None)
    )
    found = MIXERS["joint_norm_attention"].place(spec, SimpleNamespace(qk_layernorm=False), shape)
    assert found.module is JointNormAttention and found.submodules.core_attention is PackedAttention
    assert (
        found.submodules.q_layernorm is None
        and not MIXERS["joint_norm_attention"].transformer_engine
    )


def test_gated_delta_net():
    sizes = DeltaNetSizes(key_heads=2, value_heads=4, key_size=3, value_size=5, kernel=4)
    spec = MIXERS["gated_delta_net"].place(None, None, dense_shape(delta_net=sizes))
    assert spec.module is GatedDeltaNet and spec.params == {"sizes": sizes}
    assert (sizes.convolved, sizes.exchanged, sizes.projected) == (16, 20, 30)
    mixed = dense_shape(num_layers=2, mixers=("gated_delta_net", "attention"))
    assert mixer_options(mixed).get("hetereogenous_dist_checkpoint") is True


def test_a_gate_of_attention():
    assert mixer_options(dense_shape(attention_gate=True))["attention_output_gate"] is True
