import os

# Before torch is imported: this process's threads are not to spin on the trainers' cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
