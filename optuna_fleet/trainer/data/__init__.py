"""What this rank trains on, and how fast."""
