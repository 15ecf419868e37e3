"""Models in stages, one on each of a trial's devices, and several such pipelines: HetPipe.

Others use `Pipeline`, which `FleetTrial.pipeline` returns, made as its `pipeline_options` say.

- `wsp` has the rules: whose turn it is on a stage, and which weights a minibatch may start with.
  A `stage` keeps them, whether pipelines are flushed or not: they differ in their `versions` of
  the weights, and in when these are taken and given.
- Who is where: `measuring` finds out what layers cost, `layouts` decides by that, with
  `partition`; a `construction` is what one rank has of it.
- What goes between processes: `stage_messages`, by `edges`; `parameter_server`s add up waves, and
  `sums` parts of batches.
- `whole` is the state of a model in stages.
"""

from optuna_fleet.virtual_workers.pipeline import Pipeline

__all__ = ["Pipeline"]
