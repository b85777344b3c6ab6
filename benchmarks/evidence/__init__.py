"""How far gradients are off: when a pre-trained model saves less, and when codes stand for what an MLP saves."""
