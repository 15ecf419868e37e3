"""What to do next: events go in, instructions come out. Pure: no clock, no process, no I/O.

- `controller` is the state machine; `state` its only table: of devices (`Presence`), trials and
  runs.
- `planner` says when a plan is made and begins it, `problems` of what and where, `profiles` how
  fast trials train.
- `clearance`: who may be widened or moved.

Others use `Controller` and `PolicyRules`: the driver of a call, and `replay`.
"""
