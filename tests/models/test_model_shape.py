"""Sizes in a config.json: what is read and what is refused."""

from contextlib import nullcontext

import pytest

from megatron_gspo.models.model_shape import (
    ModelError,
    check_sizes,
    language_config,
)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_a_size_is_a_whole_number_above_zero(value):
    with pytest.raises(ModelError, match=r"hidden_size=.* in config\.json"):
        check_sizes({"hidden_size": value})
    check_sizes({"hidden_size": 8, "head_dim": None})


def test_experts_that_cannot_be_chosen_are_refused():
    with pytest.raises(ModelError, match="num_experts_per_tok=5 .* 4 experts"):
        check_sizes({"num_experts_per_tok": 5, "num_experts": 4})
    with pytest.raises(ModelError, match="norm_topk_prob"):
        check_sizes({"num_experts_per_tok": 1, "num_experts": 4, "norm_topk_prob": True})


def test_keys_of_a_language_model_take_the_place_of_the_whole_models():
    whole = dict(
        model_type="both",
        eos_token_id=1,
        text_config=dict(model_type="text", eos_token_id=2, vocab_size=3),
    )
    language = language_config(whole)
    assert (language["model_type"], language["eos_token_id"], language["vocab_size"]) == (
        "both",
        2,
        3,
    )
    assert language_config(language) == language and language_config({"vocab_size": 5}) == {
        "vocab_size": 5
    }


@pytest.mark.parametrize(
    ("outer", "inner", "refused"),
    [
        (True, True, False),
        (None, True, False),
        (False, True, True),
        (True, False, True),
        (True, None, False),
    ],
)
def test_whole_and_language_model_agree_on_tied_embeddings(outer, inner, refused):
    whole, text = ({} if tied is None else {"tie_word_embeddings": tied} for tied in (outer, inner))
    config = {"model_type": "both", **whole, "text_config": text}
    with (
        pytest.raises(ModelError, match=f"tie_word_embeddings={outer} in")
        if refused
        else nullcontext()
    ):
        assert language_config(config)["tie_word_embeddings"] is True
