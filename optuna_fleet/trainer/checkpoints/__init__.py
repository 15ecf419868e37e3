"""What is kept of a trial, and put back.

`states` asks the prepared objects for it, `checkpoint` packs it, in a `memory_file`, and `saving`
writes and reads it. The files themselves are a matter of `optuna_fleet.checkpoints`.
"""
