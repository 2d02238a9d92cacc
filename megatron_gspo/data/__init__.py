"""Plain data: samples, packing, prompts, tasks, verifiers and rewards.

Import from the modules (`from megatron_gspo.data.sample import Sample`). This file imports nothing,
so that a reward worker process starts without loading torch.
"""
