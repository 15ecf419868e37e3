"""One `optimize` call: hears, decides, has it done.

- `driver` is the loop: `receiver` makes events of what is heard, the controller makes instructions
  of events, the driver carries these out. `sweep` is what they share, and how they wait.
- What trials ask: `call_handler`; what their ranks have in common: `ranks`. Who hangs: `watchdog`.
- How runs (`runs`) begin (`launches`), are saved and leave (`stop_lines`), end
  (`outcomes`), and are checked before (`checks`).
- What happened, and how the call is getting on: `journal`; at last: `summary`.
"""
