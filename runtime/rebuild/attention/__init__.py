"""Attention that PyTorch does not fuse: the operations that it is composed of."""
