"""One `optimize` call: hears, decides, has it done.

- `driver` is the loop: `receiver` makes events of messages, the controller makes instructions of
  events, `performer` carries these out. `parts` is what they share.
- What trials ask: `call_handler`, `calls`. How ranks come apart: `ranks`. Who hangs: `watchdog`.
- How runs begin (`launcher`, `objective_copies`), move (`stop_lines`, `held`, `saves`), end
  (`outcomes`), and are checked before (`checks`).
- What is counted: `tally`, `call_log` and `summary`, of which users get `FleetSummary`.
"""
