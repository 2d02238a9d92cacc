"""The end tokens of a response."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_gspo.rollout.engine_protocol import end_tokens

TOKENIZER = SimpleNamespace(eos_token_id=7)


@pytest.mark.parametrize(
    "configured, tokenizer, given, found",
    [
        (3, TOKENIZER, None, (3, 7)),
        ([9, 3], TOKENIZER, None, (3, 7, 9)),
        (None, TOKENIZER, None, (7,)),
        (3, None, None, (3,)),
        (3, TOKENIZER, [5, 4], (4, 5)),  # given ones replace the others
        (7, TOKENIZER, None, (7,)),
    ],
)
def test_configured_and_tokenizer_are_joined(configured, tokenizer, given, found):
    assert end_tokens(configured, tokenizer, 10, given=given) == found


def test_none_and_one_outside_of_the_vocabulary():
    with pytest.raises(
        ValueError, match="no end token in the configs or the tokenizer: pass eos_token_ids"
    ):
        end_tokens(None, None, 10)
    with pytest.raises(
        ValueError, match=r"eos_token_ids=\[7\]: ids must lie in the vocabulary of 7"
    ):
        end_tokens(None, TOKENIZER, 7)
    with pytest.raises(ValueError, match=r"eos_token_ids=\[-1\]"):
        end_tokens(-1, None, 7)
