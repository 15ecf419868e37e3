"""What runs on a device: a process that trains one rank of one trial after another.

- `main` waits for runs; `session`, over the `link`, asks the driver during one.
- `trial` is the object that objectives get; `training` does what its methods say, with `data/`
  (batches) and `gradients/` (the mean over all ranks).
- `training_state` is all that is kept of a trial, `checkpoint` its form in memory, and `saving`
  moves and writes it. `groups` has the process groups of `torch.distributed`.

Others use `FleetTrial`, `nested` (trees of tensors) and `groups`.
"""
