"""Norms that keep their output, and merging a norm into the linear layers that follow."""
