"""What a training run needs and takes, on paper: memory and time of a step for each layout of a model on a cluster."""
