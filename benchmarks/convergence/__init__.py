"""Does training suffer? Plain PyTorch beside what keeps fewer bytes for backward, from the same seeds."""
