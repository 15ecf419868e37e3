"""The pre-flight check: does an objective give the same on several devices, and over moves?

- `check` says which rehearsals are made: one device, one that moves, several. `rehearsals` forks a
  process for each rank, `rehearsal` is what runs there, reading a `subset`.
- `recorder` notes what a result can depend on, `comparison` compares it, `verdict` says what
  follows.
- `findings` keeps that; `standalone` is the check by itself, before a machine is booked.

Others use `Finding`, `Findings`, `Verdict`, and `Rehearsals` in agents.
"""
