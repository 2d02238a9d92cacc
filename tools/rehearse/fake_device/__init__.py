"""A GPU that torch believes in, without kernels: what fake CUDA tensors need to run on a machine without one."""
