"""What this rank trains on, and how fast.

`shard_loader` gives batches out, of the passes that `reading` finds; `feed` brings them to an
accelerator; `stopwatch` measures the rate.
"""
