"""What stands where in a model so that it saves less: chosen, applied, compared, reported, put back."""
