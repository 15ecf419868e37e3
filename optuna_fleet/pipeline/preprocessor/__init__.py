"""What a preprocessor does: it makes the samples, in the canonical order."""
