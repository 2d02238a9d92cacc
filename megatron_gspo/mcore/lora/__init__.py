"""Low-rank adapters (LoRA) for Megatron's linear layers and experts."""
