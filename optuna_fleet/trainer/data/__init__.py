"""What this rank trains on, and how fast.

`shard_loader` gives out the batches; `feed` brings them to an accelerator; `telling` measures the
rate, and tells the driver of it.
"""
