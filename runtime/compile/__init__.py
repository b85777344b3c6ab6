"""Codes under the compiler: what the compiled forward pass keeps for backward, in fewer bits."""
