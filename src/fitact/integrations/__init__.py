"""What lets other libraries use fitact by name."""
