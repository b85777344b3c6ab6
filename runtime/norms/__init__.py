"""Norms that keep their output, and folding a model's norms into the linear layers that follow."""
