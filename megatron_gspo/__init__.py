"""Sequence-level policy optimisation (GSPO) on Megatron-Core."""

__version__ = "0.1.0"
