"""Models in stages, one on each of a trial's devices, and several such pipelines: HetPipe.

`make_pipeline` makes what `FleetTrial.pipeline` returns, a `Pipeline`; others use these two.

- `wsp` has the rules: whose turn it is on a stage, and which weights a minibatch may start with.
  A `stage` keeps them, whether pipelines are flushed or not: they differ in their `versions` of
  the weights, and in when these are taken and given. `simulator` keeps them with time alone.
- Who is where: `layer_costs` are measured, `stage_placement` decides by them, with `partition`,
  `partitioner`, `layouts` and `predictions`; `placing` carries it out.
- What goes between processes: `stage_messages`, by `edges` (`framing`: their bytes) to whom a
  `directory` says; `parameter_server`s add up waves, `agreement` has what else comes together.
- `whole` is the state of a model in stages, `tied` what several of them share.
"""

from optuna_fleet.virtual_workers.pipeline import Pipeline
from optuna_fleet.virtual_workers.staging import make_pipeline

__all__ = ["Pipeline", "make_pipeline"]
