"""The pre-flight check: does an objective give the same on several devices, and over moves?

- `check` says which rehearsals are made (one device, one that moves, several), compares what they
  have noted, and comes to a `verdict`. `findings` keeps what follows.
- `rehearsals` forks a process for each rank; `rehearsal` is what runs there, under `conditions`;
  its `recorder` notes what a result can depend on.
- `checker` is the check by itself, before a machine is booked.

Others use `Finding`, `Findings`, `Verdict`, and `Check` in agents.
"""
