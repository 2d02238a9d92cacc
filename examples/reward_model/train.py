"""Trains the reward model of tiny_gspo.yaml: the demo's cold start with a classifier's head learns
which of its own responses are right.

python examples/reward_model/train.py          # after `make demo`; --seed 1 for another model
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

BATCH = 128
# The line break shows where the response begins: `ball` and `lab` are wrong, `bal` and `llab` too.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


class Labelled(NamedTuple):
    """A response, and 1.0 if it is right, else 0.0."""

    prompt: str
    response: str
    label: float


def label_of(prompt: str, response: str) -> float:
    """Stands where people would label."""
    return float(response == prompt.split()[-1][::-1])


@torch.no_grad()
def labelled_responses(model: str, file: str, samples: int = 4) -> Iterator[Labelled]:
    """Responses of `model` to the prompts of `file`, drawn at temperature 1."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy: Any = AutoModelForCausalLM.from_pretrained(model)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    prompts = sorted({row["prompt"] for row in rows}) * samples
    for start in range(0, len(prompts), 4 * BATCH):
        batch = prompts[start : start + 4 * BATCH]
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        ids = policy.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=10)
        begin = inputs["input_ids"].shape[1]
        responses = tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
        for prompt, response in zip(batch, responses, strict=True):
            yield Labelled(prompt, response, label_of(prompt, response))


class RewardModel:
    """A classifier with one logit, and the text that the verifier `reward_model` gives it."""

    def __init__(self, model: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.tokenizer.chat_template = TEMPLATE
        self.classifier: Any = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1
        )

    def logits(self, batch: Sequence[Labelled]) -> Tensor:
        """[responses]"""
        conversations = [
            [
                {"role": "user", "content": example.prompt},
                {"role": "assistant", "content": example.response},
            ]
            for example in batch
        ]
        texts = self.tokenizer.apply_chat_template(conversations, tokenize=False)
        inputs = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        logits: Tensor = self.classifier(**inputs).logits[:, 0]
        return logits

    def train(self, data: Sequence[Labelled], epochs: int) -> None:
        """Binary cross entropy; the learning rate rises for a tenth of the steps, then falls to 0."""
        starts = range(0, len(data), BATCH)
        parameters = list(self.classifier.parameters())
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
        schedule = OneCycleLR(
            optimizer, max_lr=2e-3, total_steps=epochs * len(starts) + 1, pct_start=0.1
        )
        for epoch in range(1, epochs + 1):
            shuffled = random.sample(data, len(data))
            total = 0.0
            for start in starts:
                batch = shuffled[start : start + BATCH]
                labels = torch.tensor([example.label for example in batch])
                loss = binary_cross_entropy_with_logits(self.logits(batch), labels)
                loss.backward()
                clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                total += loss.item()
            print(f"epoch {epoch} of {epochs}: loss {total / len(starts):.3f}", flush=True)

    @torch.no_grad()
    def accuracy(self, data: Sequence[Labelled]) -> float:
        """The share of responses whose logit has the sign of their label."""
        labels = torch.tensor([example.label for example in data])
        return float(((self.logits(data) > 0) == labels.bool()).float().mean())

    def save(self, folder: str) -> None:
        """For `verifier_options.path`."""
        self.classifier.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def write_reward_model(
    model: str, prompts: str, held_out: str, output: str, *, epochs: int, seed: int
) -> None:
    """Train it on responses of `model` to the prompts of one file, and test it on another's."""
    random.seed(seed)
    torch.manual_seed(seed)
    data = list(labelled_responses(model, prompts))
    right = sum(example.label for example in data) / len(data)
    print(f"{len(data):,} responses, {right:.1%} are right", flush=True)
    reward_model = RewardModel(model)
    reward_model.train(data, epochs)
    reward_model.save(output)
    accuracy = reward_model.accuracy(list(labelled_responses(model, held_out)))
    print(
        f"{output}: {accuracy:.1%} of the responses to held-out prompts are told right from wrong"
    )


def main() -> None:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="runs/demo/cold_start/hf")
    parser.add_argument("--prompts", default="runs/demo/demonstrations.jsonl")
    parser.add_argument("--held-out", default="runs/demo/held_out.jsonl")
    parser.add_argument("--output", default="runs/demo/reward_model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    logging.set_verbosity_error()  # that the head is new
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # faster at this size, and the same sums on every machine
    write_reward_model(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
