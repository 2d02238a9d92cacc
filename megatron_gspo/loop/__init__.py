"""The phases of a training run, one file each; ``training_loop`` calls them."""
