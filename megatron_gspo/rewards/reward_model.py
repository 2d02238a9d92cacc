"""Rewards of a sequence classifier of Transformers, in the process and on the device of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import first_line
from megatron_gspo.paths import expand_path


class RewardModelError(Exception):
    """A reward model that can't be loaded, or a response that it can't read; in one line."""


class RewardModel:
    """The logit of a classifier with one label, or the probability of a label of several.

    It reads the prompt's messages and the response as the assistant's, in the chat template of its
    own tokenizer; without a template, the prompt's text and the response as a pair. Each rank scores
    its share of the responses. Between calls the weights are in host memory.
    """

    takes_batch = True
    scores_shares = True

    def __init__(
        self,
        *,
        path: str,
        label: str | None = None,
        batch_tokens: int = 16_384,
        max_length: int | None = None,
        dtype: str = "auto",
    ) -> None:
        """Load it into host memory.

        Args:
            path: folder of the model, with its tokenizer.
            label: of `id2label`; None for a model with a single one.
            batch_tokens: most tokens of a forward pass, padding included.
            max_length: most tokens of prompt and response; a longer one gets no reward. None: those
                that the model's config allows.
            dtype: of the weights; auto: as they are saved.

        Raises:
            RewardModelError: it can't be used as a reward model.
        """
        path = expand_path(path)
        if not Path(path).is_dir():
            raise RewardModelError(f"path is {path!r}: no such folder; name one with the model")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
            self._model, report = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise RewardModelError(f"path is {path!r}: {first_line(error)}") from error
        if report["missing_keys"]:
            missing = min(report["missing_keys"])
            raise RewardModelError(
                f"path is {path!r}: it has no weights for {missing}; name a sequence classifier"
            )
        self._model.eval().requires_grad_(False)
        self._label = _position_of(label, self._model.config)
        self._batch_tokens = batch_tokens
        limit = getattr(self._model.config, "max_position_embeddings", None)
        self._max_length = max_length or limit or self._tokenizer.model_max_length
        if self._tokenizer.pad_token_id is None:
            raise RewardModelError(f"path is {path!r}: its tokenizer has no pad_token; set one")
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def __call__(
        self, responses: Sequence[str], prompts: Sequence[Prompt]
    ) -> list[float | Exception]:
        """A reward for each response, or why it has none."""
        encoded = [
            self._encode(prompt, response)
            for response, prompt in zip(responses, prompts, strict=True)
        ]
        lengths = [len(inputs["input_ids"]) for inputs in encoded]
        rewards: list[float | Exception] = [
            RewardModelError(
                f"prompt and response have {length} tokens, the reward model reads"
                f" {self._max_length}"
            )
            for length in lengths
        ]
        fitting = [i for i, length in enumerate(lengths) if length <= self._max_length]
        device = _device()
        self._model.to(device)
        try:
            for positions in batches_by_length([lengths[i] for i in fitting], self._batch_tokens):
                batch = [fitting[position] for position in positions]
                for i, reward in zip(batch, self._score([encoded[i] for i in batch]), strict=True):
                    rewards[i] = reward
        finally:
            self._model.to("cpu")
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return rewards

    def _encode(self, prompt: Prompt, response: str) -> Mapping[str, list[int]]:
        """The model's inputs for one response."""
        if self._tokenizer.chat_template is None:
            question = "\n\n".join(str(message["content"]) for message in prompt.messages)
            inputs: Mapping[str, list[int]] = self._tokenizer(question, response)
            return inputs
        text = self._tokenizer.apply_chat_template(
            _with_response(prompt.messages, response), tokenize=False
        )
        inputs = self._tokenizer(text, add_special_tokens=False)
        return inputs

    @torch.no_grad()
    def _score(self, encoded: Sequence[Mapping[str, list[int]]]) -> list[float]:
        batch = self._tokenizer.pad(
            [dict(inputs) for inputs in encoded],
            padding_side="right",
            return_tensors="pt",
            verbose=False,
        )
        logits: Tensor = self._model(**batch.to(self._model.device)).logits.float()
        if self._model.config.num_labels > 1:
            logits = logits.softmax(-1)
        scores: list[float] = logits[:, self._label].tolist()
        return scores


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Positions in order of their lengths, in batches of at most `batch_tokens` with padding, or of
    one that is longer.
    """
    batch: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
        if batch and (len(batch) + 1) * lengths[position] > batch_tokens:
            yield batch
            batch = []
        batch.append(position)
    if batch:
        yield batch


def _with_response(messages: Sequence[dict[str, Any]], response: str) -> list[dict[str, Any]]:
    """The messages with the response as the assistant's, which may continue its last one."""
    if messages and messages[-1]["role"] == "assistant":
        begun = messages[-1]
        return [*messages[:-1], {**begun, "content": f"{begun['content']}{response}"}]
    return [*messages, {"role": "assistant", "content": response}]


def _position_of(label: str | None, config: Any) -> int:
    labels: dict[int, str] = config.id2label
    if label is None and len(labels) == 1:
        return 0
    positions = {name: position for position, name in labels.items()}
    if label is None or label not in positions:
        raise RewardModelError(f"label is {label!r}; use one of {', '.join(positions)}")
    return positions[label]


def _device() -> torch.device:
    """The rank's."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
