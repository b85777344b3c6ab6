"""Norms, and folding them."""
