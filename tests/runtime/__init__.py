"""Generated modules at work: kernels, ops, compilers, GPUs."""
