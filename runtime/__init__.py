"""What generated activations, and the models trained with them, need at run time."""
