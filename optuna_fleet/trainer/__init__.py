"""What runs on a device: a process that trains one rank of one trial after another.

- `main` waits for runs; `session` and `inbox` are the link to the driver during one.
- `trial` is the object that objectives get; `training` does what its methods say, with `data/`
  (batches), `gradients/` (the mean over all ranks), `moves/` and `checkpoints/`.
- `state` is all that is kept of a trial. `groups` has the process groups of `torch.distributed`.

Others use `FleetTrial`, `nested` (trees of tensors) and `groups`.
"""
