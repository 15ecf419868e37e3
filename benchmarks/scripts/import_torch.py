"""Import torch and torchvision, and say when that was done."""

import time

import torch
import torchvision  # noqa: F401

print(time.time())
