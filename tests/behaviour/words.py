"""What torch says of its own code, where it runs; other warnings are errors, in trainers too."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # the default of KLDivLoss
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile
    # What torch 2.4 says of its own torch.compile, and of its own activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast.* is deprecated"),
]
