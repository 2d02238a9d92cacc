"""Checks a machine, a config and the ranks before a run starts: ``megatron-gspo doctor``."""
