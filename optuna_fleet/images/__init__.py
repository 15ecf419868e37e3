"""What data sets of photographs may use; the pipeline knows nothing of it."""
