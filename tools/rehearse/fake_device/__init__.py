"""A CUDA device without kernels, for fake CUDA tensors on a machine without a GPU."""
