"""GSPO in a Megatron-Core loop of your own.

torchrun --nproc-per-node 2 examples/plugin/train_own_loop.py
"""

import megatron_gspo.mcore  # noqa: F401  first: it corrects Megatron, and lets it run without a GPU

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.algorithms import group_advantages, preset
from megatron_gspo.data.packing import PackedBatch, pack
from megatron_gspo.data.sample import Sample
from megatron_gspo.mcore.forward_step import policy_forward_step
from megatron_gspo.mcore.layers import block_spec


def rollout(step: int, vocabulary: int = 64) -> list[PackedBatch]:
    """Yours: any engine that gives token ids, log-probs and a reward."""
    random = np.random.default_rng(step)
    samples = [
        Sample(
            i // 4,
            i % 4,
            random.integers(0, vocabulary, 24),
            prompt_length=8,
            loss_mask=np.ones(16, bool),
            rollout_log_probs=None,
            finish_reason="stop",
            reward=float(random.integers(2)),
        )
        for i in range(8)
    ]
    rewards = torch.tensor([s.reward for s in samples])
    groups = torch.tensor([s.prompt_index for s in samples])
    for sample, advantage in zip(samples, group_advantages(rewards, groups).tolist(), strict=True):
        sample.advantages = np.full(16, advantage, np.float32)
        # Yours: the policy before its first update.
        sample.old_log_probs = np.full(16, -np.log(vocabulary), np.float32)
    return [pack(half, num_sequences=8, num_tokens=128) for half in (samples[:4], samples[4:])]


dist.init_process_group()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    normalization="RMSNorm",
    add_bias_linear=False,
    tensor_model_parallel_size=dist.get_world_size(),
    attention_dropout=0.0,
    hidden_dropout=0.0,
    use_cpu_initialization=not torch.cuda.is_available(),
    gradient_accumulation_fusion=False,
)
model = GPTModel(
    config,
    block_spec(config, transformer_engine=False),
    vocab_size=64,
    max_sequence_length=64,
    position_embedding_type="rope",
)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32), [model]
)
objective = preset("gspo", epsilon_low=0.01, epsilon_high=0.015)
for step in range(3):
    batches = rollout(step)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=policy_forward_step(objective, num_microbatches=len(batches)),
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=96,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads([model])
    _, grad_norm, _ = optimizer.step()
    if dist.get_rank() == 0:
        loss = sum(float(output["metrics"]["loss"]) for output in outputs)
        print(f"step {step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}")
dist.destroy_process_group()
