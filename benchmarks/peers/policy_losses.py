"""The peers' own policy losses (GSPO), metrics included, on padded batches. Imports nothing of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLIP = (3e-4, 4e-4)
Loss = Callable[[Tensor], Tensor]  # log-probs [B, R] -> the loss
Prepare = Callable[[Tensor, Tensor, Tensor], Loss]  # old, mask [B, R], advantages [B]: what a batch holds beforehand


def verl_loss() -> Prepare:
    """verl's `gspo` with the published aggregation."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="megatron", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=CLIP[0],
                         clip_ratio_high=CLIP[1], global_batch_info={})  # fmt: skip
    compute = core_algos.get_policy_loss_fn("gspo")

    def prepare(old: Tensor, mask: Tensor, advantages: Tensor) -> Loss:
        by_token = advantages[:, None].expand_as(old)
        return lambda log_probs: compute(old, log_probs, by_token, mask, loss_agg_mode="seq-mean-token-mean",
                                         config=config)[0]  # fmt: skip

    return prepare


def trl_loss(model: Path) -> Prepare:
    """`GRPOTrainer._compute_loss` of a real trainer whose pass of the model returns the given log-probs."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class FedTrainer(trl.GRPOTrainer):
        fed: Tensor

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
            return self.fed, torch.zeros_like(self.fed), None

    config = trl.GRPOConfig(
        output_dir=tempfile.gettempdir(), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=8, num_generations=4, router_aux_loss_coef=0.0, beta=0.0, loss_type="grpo",
        importance_sampling_level="sequence", epsilon=CLIP[0], epsilon_high=CLIP[1],
    )  # fmt: skip
    trainer = FedTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lambda completions, **_: [0.0], config,
        Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def prepare(old: Tensor, mask: Tensor, advantages: Tensor) -> Loss:
        ids = torch.ones(mask.shape, dtype=torch.long)
        batch = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": ids,
            "tool_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old,
            "ref_per_token_logps": None, "num_items_in_batch": mask.sum(),
        }  # fmt: skip

        def run(log_probs: Tensor) -> Tensor:
            trainer.fed = log_probs
            return trainer._compute_loss(trainer.model, batch)

        return run

    return prepare
