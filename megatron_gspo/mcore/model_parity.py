"""Compare a Megatron checkpoint with its Hugging Face model by the log-probs of a text under
both.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gspo.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import compute_device, initialize, shutdown
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.models import family_of, read_config

TOLERANCE = 1e-4  # nats, in float32: wrong weights are off by whole nats, rounding by about 1e-6


def compare_log_probs(hugging_face: Path, megatron: Path, text: str) -> tuple[float, int]:
    """(Largest difference of two log-probs in nats, tokens compared), in float32 and one process.

    Raises ``InputError`` for a text that cannot be tokenized, or models that differ by more than
    ``TOLERANCE``.
    """
    tokens = _tokens(hugging_face, text)
    ours = _by_megatron(hugging_face, megatron, tokens)
    theirs = _by_transformers(hugging_face, tokens)
    difference = float(np.abs(ours - theirs).max())
    if not difference <= TOLERANCE:
        both = f"{hugging_face} and {megatron}"
        raise InputError(f"log-probs of {both} differ by {difference:.3g} nats; convert it again")
    return difference, len(ours)


def _tokens(path: Path, text: str) -> np.ndarray:
    try:
        tokens = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: no tokenizer can be loaded ({first_line(error)})") from None
    if len(tokens) < 2:
        length = f"{len(tokens)} tokens of the tokenizer in {path}"
        raise InputError(f"--probe={text!r} is {length}; give a text of at least two")
    return np.asarray(tokens, dtype=np.int64)


def _by_megatron(hugging_face: Path, checkpoint: Path, tokens: np.ndarray) -> np.ndarray:
    family, shape = family_of(read_config(hugging_face))
    parallel = ParallelConfig()
    model = ModelConfig(path=str(hugging_face), dtype="float32")
    groups = initialize(parallel, seed=0)
    try:
        [chunk] = build_model(shape, parallel, model, groups)
        chunk.load_state_dict(
            dist_checkpointing.load({"model": chunk.sharded_state_dict()}, str(checkpoint))["model"]
        )
        policy = Policy([chunk], groups, family, shape, str(hugging_face))
        sample = Sample(0, 0, tokens, 1, np.ones(len(tokens) - 1, dtype=bool), None, "stop")
        training = TrainingConfig(
            steps=1, global_batch_size=1, max_tokens_per_micro_batch=len(tokens)
        )
        return compute_log_probs(
            policy, TrainingBatch.of([sample]), training, temperature=1.0
        ).log_probs
    finally:
        shutdown()


@torch.no_grad()
def _by_transformers(path: Path, tokens: np.ndarray) -> np.ndarray:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = model.to(compute_device()).eval()
    ids = torch.from_numpy(tokens).to(compute_device())
    log_probs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[:, 0].cpu().numpy()
