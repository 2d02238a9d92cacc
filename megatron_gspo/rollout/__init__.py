"""Rollouts: one protocol (`engine_protocol`) and the engines that follow it.

Import from the modules (`from megatron_gspo.rollout.embedded.embedded_engine import
EmbeddedEngine`): only those that need Transformers import it.
"""
