"""What outlives a call: nodes, their trainers, the channels to them. Others use `Runtime`.

- `runtime` joins the rest. `agents` and `nodes`: who joins, is silent, leaves. `trainers`: the
  life of the processes on devices. `faults`: who is left out.
- `inbox`: the one queue of what happens, messages, departures and times. `listener` has the one
  thread that waits for sockets and times; `connections`: who is at their other ends.
- `transfer_server`: checkpoints and data sets.
- `rendezvous`: where ranks find each other. `sharing`: which nodes exchange what is preprocessed.
"""
