"""One `optimize` call: hears, decides, has it done.

- `driver` is the loop: `receiver` makes events of messages, the controller makes instructions of
  events, `performer` carries these out. `parts` is what they share.
- What trials ask: `call_handler`, `calls`. How ranks come apart: `ranks`. Who hangs: `watchdog`.
- How runs begin (`launcher`, `objective_copies`), move (`stop_lines`, `held`, `saves`), end
  (`outcomes`), and are checked before (`checks`).
- What happened: `journal`, and what is made of it: `device_log`, `moves`, `progress`, `tally`;
  `pipeline_log`. Users get a `FleetSummary` (`summary`).
"""
