"""The project as a whole: documentation, notebooks, the wheel, training."""
