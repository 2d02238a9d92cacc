"""Layer facts of GLM-4.5 to 4.7."""

from __future__ import annotations

from megatron_gspo.models import family_of
from tests.support.tiny_models import tiny_config


def test_facts_by_hand():
    _, shape = family_of(tiny_config("glm").to_dict())
    assert (shape.rotary.dim, shape.head_dim, shape.rotary.interleaved) == (8, 16, False)
    assert shape.attention_bias and shape.query_key_norms and shape.latent is None
    assert (
        shape.router.expert_bias
        and shape.router.scaling == 1.7
        and shape.moe_layers == (False, True, True, True)
    )


def test_biases_and_norms_are_options_and_the_rotated_share_has_two_places():
    config = tiny_config("glm", use_qk_norm=False, attention_bias=False).to_dict()
    family, shape = family_of(config)
    names = {name for rule in family.layer_rules(shape, 0) for name in rule.hugging_face}
    assert not {name for name in names if "bias" in name or "q_norm" in name}
    old = {**config, "rope_parameters": None, "rope_theta": 5.0, "partial_rotary_factor": 0.25}
    assert (family_of(old)[1].rotary.dim, family_of(old)[1].rotary.base) == (4, 5.0)
    new = old | {"rope_parameters": {"rope_theta": 6.0, "partial_rotary_factor": 0.75}}
    assert (family_of(new)[1].rotary.dim, family_of(new)[1].rotary.base) == (12, 6.0)
