"""For what tells nobody that it has come about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any]) -> None:
    """Ask again and again; the test's own timeout is the limit."""
    while not condition():
        time.sleep(0.02)
