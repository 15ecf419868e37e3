"""Optuna's own tests, run through `executor=`."""
