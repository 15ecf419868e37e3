"""Slurm: the nodes of an allocation, and pilot jobs that come and go."""
