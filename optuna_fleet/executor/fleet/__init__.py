"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest; what happens comes by its inbox, where `connections` puts what agents
  and trainers say.
- `agents`: the nodes; who joins, is silent, leaves. `trainers`: the processes on devices.
  `faults`: what fails in a row, and is left out.
- `pipelines`: what the nodes' pipelines have done and can do, and who shares chunks.
"""
