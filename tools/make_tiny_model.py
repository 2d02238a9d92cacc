"""Write a small random Qwen3-MoE with a character tokenizer, for the demo and for trials on a CPU.

    python -m megatron_gspo.tools.make_tiny_model DIR --word "Spell this word backward (example: sun
    -> nus):"

Each ``--word`` is one token, so that a constant instruction takes little of the prompt; the
prompt's text is unchanged.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL = ("<pad>", "<eos>", "<unk>")
# No marks of roles: a conversation reads as one text.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor -%}
"""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the model; the head dimension is 32."""

    hidden: int = 128
    layers: int = 4
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 96
    heads: int = 4
    key_value_heads: int = 2


def character_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per ASCII character, and one for each of ``words``."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def write_tiny_model(
    folder: str | Path,
    size: TinyModel = TinyModel(),
    *,
    words: Sequence[str] = (),
    seed: int = 0,
) -> int:
    """Write config, random float32 weights and tokenizer to ``folder``; returns the number of
    parameters.

    words: texts that are one token each.
    """
    tokenizer = character_tokenizer(words)
    config = Qwen3MoeConfig(  # type: ignore[call-arg] # head_dim and rope_theta reach the base class
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=size.hidden,
        intermediate_size=size.expert_width,
        moe_intermediate_size=size.expert_width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=32,
        num_experts=size.experts,
        num_experts_per_tok=size.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument(
        "--word", action="append", default=[], help="a text that is one token; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(TinyModel):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args()
    size = TinyModel(**{field.name: getattr(options, field.name) for field in fields(TinyModel)})
    count = write_tiny_model(options.folder, size, words=options.word, seed=options.seed)
    print(f"{count:,} parameters")


if __name__ == "__main__":
    main()
