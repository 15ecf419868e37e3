"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest; what happens comes by its inbox, where `connections` puts what agents
  and trainers say.
- `nodes`: the table of nodes. `agents`: who joins, is silent, leaves. `trainers`: the processes on
  devices. `faults`: what fails in a row, and is left out.
- `rendezvous`: where ranks find each other. `pipelines`: what the nodes' pipelines have done and
  can do, and who shares chunks.
"""
