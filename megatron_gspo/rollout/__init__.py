"""Rollouts: one protocol (`engine`), and the engines that follow it.

Import from the modules (`from megatron_gspo.rollout.embedded import EmbeddedEngine`): only those that need
Transformers import it.
"""
