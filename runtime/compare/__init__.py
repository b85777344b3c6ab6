"""A model with every method and baseline side by side: bytes, FLOPs, the largest sizes that fit."""
