"""The only room that writes to a study.

- `keyword` gives `Study.optimize` its `executor=`; `loop` is the context of one such call.
- `proposals` asks the study for trials, `ledger` tells it what becomes of them, `patience` waits
  for its storage, `ownership` and `retention` say whose trials and checkpoints stay.
- `records` is what is noted with a study for those who look at it.
- `compat` has every private name of Optuna.

Others use `Loop`, its `proposals` and `ledger`, `records`, and `compat`.
"""
