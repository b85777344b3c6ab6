"""What tests share: references to compare with, and what ships, by kind."""
