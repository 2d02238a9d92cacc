"""Samples and prompts for the tests of this folder."""

import numpy as np

from megatron_gspo.data.sample import Prompt, Sample


class CharTokenizer:
    """One id per character (its code point) after a start id 1; the chat template spells out
    the roles.
    """

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert tokenize is False and add_generation_prompt is True
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class ReadItems(list):
    """A list that knows which of its items were read by index."""

    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def make_prompt(index=0, text="2+2=", answer="4", **metadata):
    return Prompt(index, np.array([ord(letter) for letter in text]), text, answer, metadata)


def make_sample(prompt_length, response_length, *, seed=0, mask=None, log_probs=True, **extra):
    """A sample whose values are all different and, at trained tokens, never 0."""
    rng = np.random.default_rng(seed)
    values = {
        "prompt_index": seed,
        "sample_index": 0,
        "tokens": rng.integers(1, 1000, prompt_length + response_length),
        "prompt_length": prompt_length,
        "loss_mask": np.array([True] * response_length if mask is None else mask, dtype=bool),
        "rollout_log_probs": None,
        "finish_reason": "stop",
    }
    if log_probs:
        for name in (
            "rollout_log_probs",
            "old_log_probs",
            "ref_log_probs",
            "advantages",
            "values",
            "returns",
        ):
            values[name] = (-1 - rng.random(response_length)).astype(np.float32)
    return Sample(**(values | extra))


def trained_only(values, samples):
    """What a training pass reports of per-token ``values``, [R] of each sample: 0 at untrained
    tokens.
    """
    return [
        np.where(sample.loss_mask, value, 0) for value, sample in zip(values, samples, strict=True)
    ]


def make_routes(rows, layers, k, num_experts, *, seed=0):
    """[rows, layers, k] in the smallest unsigned type: k different experts in every row, in any
    order.
    """
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, layers, num_experts)).argsort(-1)[..., :k]
    return ids.astype(np.uint8 if num_experts <= 256 else np.uint16)
