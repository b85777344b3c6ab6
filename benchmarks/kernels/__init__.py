"""Times, bytes and registers of the kernels."""
