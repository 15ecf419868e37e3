"""A pipeline without an executor, for training processes that the user starts."""
