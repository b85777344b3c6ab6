"""What goes into each activation of a model, gathered while it runs."""
