"""Outputs that nobody keeps: they are rebuilt in backward from what is kept anyway, gradients bit for bit."""
