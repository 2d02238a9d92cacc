"""Checks a machine, a config and the ranks before a run starts: ``python -m megatron_gspo.tools.doctor``."""
