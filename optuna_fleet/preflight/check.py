"""The check itself: which runs are made, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.preflight.verdict import NotChecked, Verdict


class Checker:
    """Checks objectives in throw-away processes, which are forked from one that it keeps."""

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""

    def check(
        self,
        objective: Callable[[Any], Any],
        pipeline: SharedPipeline | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Check an objective, with these parameters or with some that are drawn."""
        return NotChecked(why="nothing is done yet")
