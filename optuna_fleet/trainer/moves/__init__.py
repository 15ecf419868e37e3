"""Leaving devices, and going on on others.

All ranks come to one step (`stop_line`, `within_epoch`), are saved there and leave (`leaving`);
sums over an epoch (`totals`) go with the trial.
"""
