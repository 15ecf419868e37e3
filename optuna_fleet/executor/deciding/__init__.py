"""What to do next: events go in, instructions come out. Pure: no clock, no process, no I/O.

- `controller` is the state machine; `trials` has the tables of it: `Trial`, `Run`, `PolicyRules`.
- `roster`: who is where; `presence`: which devices are there; `profiles`: how fast trials train.
- `planner` says when a plan is made and begins it, `problem_builder` what it is made of.
- `clearance`: who may be widened or moved; `avoidance`: where a trial is not started again.
- `convergence`: when a trial has converged.

Others use `Controller` and `PolicyRules`: the driver of a call, and `replay`.
"""
