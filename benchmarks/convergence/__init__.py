"""Does training suffer? Stock PyTorch beside what keeps fewer bytes for backward, from the same seeds."""
