"""What models save."""
