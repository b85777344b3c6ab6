"""The ops: autograd, the kinds of activation, launching kernels, and the same in PyTorch's operators."""
