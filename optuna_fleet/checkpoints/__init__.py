"""Checkpoints: their files and folders, and what a user does with them."""
