"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest. `agents` and `nodes`: who joins, is silent, leaves. `trainers`: the
  life of the processes on devices. `faults`: who is left out.
- `connections`: who is at the other ends of the sockets that `wire` watches.
- `rendezvous`: where ranks find each other. `sharing`: which nodes exchange what is preprocessed.
- `capacity`: what preprocessors give.
"""
