"""The rules that a model of a family has."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.models import Family, Rule
from megatron_gspo.models.families import with_value_head
from tests.support.model_shapes import dense_shape

FAST = Rule(("fast",), ("a",))
SLOW = Rule(("slow",), ("b",), applies=lambda shape: shape.attention_bias)
DENSE = Rule(("dense",), ("c",))
EXPERTS = Rule(("experts",), ("d",))
FAMILY = Family(
    "any",
    lambda config: dense_shape(),
    {"fast": (FAST,), "slow": (FAST, SLOW)},
    (DENSE,),
    (EXPERTS,),
)


def test_a_layer_has_the_rules_of_its_mixer_and_its_mlp_that_apply():
    shape = dense_shape(mixers=("slow", "fast"), moe_layers=(False, True))
    assert [FAMILY.layer_rules(shape, layer) for layer in (0, 1)] == [
        (FAST, DENSE),
        (FAST, EXPERTS),
    ]
    assert FAMILY.layer_rules(replace(shape, attention_bias=True), 0) == (FAST, SLOW, DENSE)


def test_the_output_weight_is_absent_where_it_is_tied_and_a_value_head_takes_its_place():
    shape = dense_shape()
    assert [rule.hugging_face[0] for rule in FAMILY.outer_rules(shape)][2:] == ["lm_head.weight"]
    assert len(FAMILY.outer_rules(replace(shape, tied_embeddings=True))) == 2
    assert [rule.hugging_face[0] for rule in FAMILY.outer_rules(with_value_head(shape))][2:] == [
        "score.weight"
    ]
