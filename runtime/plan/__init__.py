"""What each way to train a block costs, measured without memory; and blocks changed to a way."""
