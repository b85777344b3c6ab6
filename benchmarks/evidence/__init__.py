"""How far gradients are off: when a pre-trained model keeps less, and when codes stand for what an MLP keeps."""
