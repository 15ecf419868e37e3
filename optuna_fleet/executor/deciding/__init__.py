"""What to do next: events go in, instructions come out. Pure: no clock, no process, no I/O.

- `controller` is the state machine; `state` its only table: of `trials` (`Trial`, `Run`), and of
  the devices that are there (`presence`).
- `planner` says when a plan is made and begins it, `problems` what it is made of, `profiles` how
  fast trials train.
- `clearance`: who may be widened or moved; `avoidance`: where a trial is not started again.
- `convergence`: when a trial has converged.

Others use `Controller` and `PolicyRules`: the driver of a call, and `replay`.
"""
