"""Where trainers run."""
