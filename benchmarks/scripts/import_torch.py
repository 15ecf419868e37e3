"""Import torch and torchvision, and say when that was done."""

import time

import torch  # noqa: F401
import torchvision  # noqa: F401

print(time.time())
