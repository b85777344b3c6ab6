"""What models keep."""
