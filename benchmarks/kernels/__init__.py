"""Times, bytes and instructions of the kernels."""
