"""`torch.compile` with block codes in place of what the compiled forward pass saves for backward."""
