"""A model's activations replaced: where they are, what each gets, what it keeps."""
