"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest. `agents` and `nodes`: who joins, is silent, leaves. `trainers`: the
  life of the processes on devices. `faults`: who is left out.
- `listener` and `connections` have the sockets; `transfer_server`: checkpoints and data sets.
- `rendezvous`: where ranks find each other. `sharing`: which nodes exchange what is preprocessed.
- `capacity`: what preprocessors give.
"""
