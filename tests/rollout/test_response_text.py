"""The text of a response that verifiers and environments get, for tokenizers as models have
them.
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_gspo.rollout.response_text import ResponseDecoder


def tokenizer(
    *, special: tuple[str, ...] = (), added: tuple[str, ...] = (), **names: str
) -> PreTrainedTokenizerFast:
    """Characters, special and added tokens, and tokens with a name such as eos_token."""
    inner = Tokenizer(models.WordLevel({"4": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(word, normalized=False) for word in added])
    inner.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **names
    )


QWEN = tokenizer(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<answer>", "</answer>"),
    added=("<think>", "</think>"),
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
)
GPT_OSS = tokenizer(
    special=(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
    ),
    eos_token="<|return|>",
    pad_token="<|endoftext|>",
)
CHANNELS = "<|channel|>a<|message|>a<|end|><|start|>a<|channel|>b<|message|>4"


@pytest.mark.parametrize(
    ("tok", "ends", "response", "kept", "stripped"),
    [
        (QWEN, ("<|im_end|>",), "<answer>4</answer><|im_end|>", "<answer>4</answer>", "4"),
        (
            QWEN,
            ("<|im_end|>",),
            "<think>a</think>4<|im_end|>",
            "<think>a</think>4",
            "<think>a</think>4",
        ),
        (QWEN, ("<|im_end|>",), "<answer>4", "<answer>4", "4"),  # cut off
        (QWEN, ("<|endoftext|>", "<|im_end|>"), "4<|endoftext|>", "4", "4"),
        (QWEN, ("<|im_end|>",), "4<|im_end|><|endoftext|>", "4", "4"),  # padded
        (QWEN, ("<|im_end|>",), "4<|im_start|>a", "4<|im_start|>a", "4a"),
        (GPT_OSS, ("<|return|>", "<|call|>"), f"{CHANNELS}<|return|>", CHANNELS, "aaab4"),
        (GPT_OSS, ("<|return|>", "<|call|>"), f"{CHANNELS}<|call|>", CHANNELS, "aaab4"),
        (QWEN, ("4",), "ab4", "ab", "ab"),
        (QWEN, ("<|im_end|>",), "<|im_end|>", "", ""),
    ],
)
def test_tags_and_channels_are_kept_and_end_tokens_are_not(tok, ends, response, kept, stripped):
    ids = tok.encode(response, add_special_tokens=False)
    end_ids = tok.convert_tokens_to_ids(list(ends))
    assert ResponseDecoder(tok, end_ids)(ids) == kept
    assert ResponseDecoder(tok, end_ids, keep_special_tokens=False)(ids) == stripped
