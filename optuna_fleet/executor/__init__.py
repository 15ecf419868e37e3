"""Running trials on a fleet: `FleetExecutor` and what stands behind it.

- `fleet_executor` is what users construct; `fleet_runner` runs its calls.
- `call/` is one `optimize` call, `deciding/` what it does next (pure), `fleet/` what outlives it.
- `cluster/` starts agents: on this machine, under Slurm, Ray, or by hand.

Others use `FleetExecutor`. `replay` drives `deciding` with a clock of its own.
"""
