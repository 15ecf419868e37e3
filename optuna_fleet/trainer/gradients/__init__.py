"""Data parallelism: one trial's gradients, over its ranks."""
