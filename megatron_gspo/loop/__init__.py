"""The phases of a training run, one file each; ``megatron_gspo.train`` is the loop that calls them."""
