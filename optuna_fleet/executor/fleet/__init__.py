"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest; what happens comes by its inbox, where `connections` puts what agents
  and trainers say.
- `agents` and `nodes`: who joins, is silent, leaves. `trainers`: the life of the processes on
  devices. `faults`: who is left out.
- `rendezvous`: where ranks find each other. `pipelines`: what the nodes' pipelines have done, and
  who shares chunks.
- `capacity`: what preprocessors give.
"""
