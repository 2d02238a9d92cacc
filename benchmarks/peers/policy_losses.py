"""The peers' own policy losses (GSPO), metrics included, on padded batches. Imports nothing of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLIP = (3e-4, 4e-4)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # log-probs, old, mask [B, R], advantages [B] -> the loss


def verl_loss() -> Loss:
    """verl's `gspo` with the published aggregation."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="megatron", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=CLIP[0],
                         clip_ratio_high=CLIP[1], global_batch_info={})  # fmt: skip
    compute = core_algos.get_policy_loss_fn("gspo")

    def run(log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        by_token = advantages[:, None].expand_as(log_probs)
        return compute(old, log_probs, by_token, mask, loss_agg_mode="seq-mean-token-mean", config=config)[0]

    return run


def trl_loss(model: Path) -> Loss:
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

    def run(log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        trainer.fed = log_probs
        ids = torch.ones(mask.shape, dtype=torch.long)
        return trainer._compute_loss(trainer.model, {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": ids,
            "tool_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old,
            "ref_per_token_logps": None, "num_items_in_batch": mask.sum(),
        })  # fmt: skip

    return run
