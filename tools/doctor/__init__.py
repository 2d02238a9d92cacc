"""Looks at a machine, a config and the ranks of a run before the run starts: ``python -m megatron_gspo.tools.doctor``."""
