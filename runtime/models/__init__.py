"""Models to measure, built without memory."""
