"""From an activation to a fit of its derivative."""
