"""What to do next. Pure."""
