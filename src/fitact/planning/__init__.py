"""The plan for a memory budget: the programme that finds it, its record, its front and picture."""
