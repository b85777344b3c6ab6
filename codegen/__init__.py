"""From a fit to the source text of a PyTorch activation."""
