"""Sequence classifiers that Transformers has saved, against each response in a pass of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.reward_model import batches_by_length
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.rewards.verifiers import VerifierError, load_verifier
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.samples import make_prompt

RESPONSES = ("four", "4", "I am not sure, it may be four or five", "four", "")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def prompts() -> list[Prompt]:
    """A question, and messages that end with the beginning of the assistant's."""
    question = make_prompt(0)
    question.messages = [{"role": "user", "content": "2+2?"}]
    begun = make_prompt(1)
    begun.messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "It is "},
    ]
    return [question, question, question, begun, begun]


def save(folder: Path, *, labels: int = 1, causal: bool = False) -> str:
    """A random Qwen3, a classifier unless causal."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES, vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, num_labels=labels
    )
    model = Qwen3ForCausalLM(config) if causal else Qwen3ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_bert(folder: Path) -> str:
    """A random BERT with three labels, whose tokenizer has no chat template."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = BertConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


def logits_alone(path: str, texts: list[str]) -> torch.Tensor:
    """Of each text in a pass of its own, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = chat_tokenizer()
    # Any id but those in the texts; a single sequence has no padding.
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        return torch.cat(
            [
                model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits
                for text in texts
            ]
        )


@pytest.mark.parametrize("batch_tokens", [1, 150, 10_000])
def test_the_score_is_that_of_the_conversation_alone(tmp_path, batch_tokens):
    path = save(tmp_path)
    options = {"path": path, "batch_tokens": batch_tokens}
    with RewardScorer("reward_model", options, timeout=None) as scorer:
        assert scorer.takes_batch and not scorer.needs_whole_batch
        scores = scorer.score_texts(list(zip(RESPONSES, prompts(), strict=True)))
        assert scorer.score_texts([]).rewards.size == 0
    conversations = [
        [*prompt.messages, {"role": "assistant", "content": response}]
        for response, prompt in zip(RESPONSES[:3], prompts()[:3], strict=True)
    ]
    for response in RESPONSES[3:]:
        question = prompts()[3].messages[:2]
        conversations.append([*question, {"role": "assistant", "content": f"It is {response}"}])
    texts = [chat_tokenizer().apply_chat_template(c, tokenize=False) for c in conversations]
    expected = logits_alone(path, texts)[:, 0].numpy()
    assert len(np.unique(expected)) == len(RESPONSES)
    np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)


def test_the_probability_of_a_label_of_the_pair(tmp_path):
    path = save_bert(tmp_path)
    question = prompts()[0]
    with RewardScorer("reward_model", {"path": path, "label": "good"}, timeout=None) as scorer:
        scores = scorer.score_texts([(response, question) for response in RESPONSES])
    expected = logits_alone(path, [f"2+2?{response}" for response in RESPONSES]).softmax(-1)[:, 2]
    np.testing.assert_allclose(scores.rewards, expected.numpy(), atol=1e-5)
    with pytest.raises(VerifierError, match="label is None; use one of bad, fair, good"):
        load_verifier("reward_model", {"path": path})


def test_a_response_that_is_too_long_is_left_out_and_not_cut(tmp_path):
    path = save(tmp_path)
    question = prompts()[0]
    with RewardScorer("reward_model", {"path": path}, timeout=None) as scorer:
        scores = scorer.score_texts([("four", question), ("x" * 64, question), ("5", question)])
    assert np.isfinite(scores.rewards[[0, 2]]).all() and np.isnan(scores.rewards[1])
    assert "tokens, the reward model reads 64" in scores.messages[1]
    assert scores.counts == {"error": 1, "timeout": 0, "invalid": 0}


def test_a_model_without_a_classifiers_head_is_refused(tmp_path):
    path = save(tmp_path, causal=True)
    with pytest.raises(VerifierError, match=r"it has no weights for score\.weight; name a"):
        load_verifier("reward_model", {"path": path})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "absent"}, "no such folder"),
        ({"path": "."}, "path is '.': "),
        ({"model": "x"}, "don't fit"),
    ],
)
def test_a_wrong_option_is_refused_at_the_start(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VerifierError, match=words) as raised:
        load_verifier("reward_model", options)
    assert "\n" not in str(raised.value)


def test_batches_by_length():
    assert list(batches_by_length([5, 1, 9, 2, 2], 6)) == [[1, 3, 4], [0], [2]]
    assert list(batches_by_length([], 6)) == []
