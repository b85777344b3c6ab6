"""Models converted."""
