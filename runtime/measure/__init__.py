"""Models without memory, and what running them saves, takes at its peak and computes."""
