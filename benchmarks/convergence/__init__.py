"""Does training suffer? Plain PyTorch beside what saves fewer bytes for backward, from the same seeds."""
