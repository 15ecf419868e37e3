"""A trainer's side: batches out of chunks."""
