"""What the ranks of a run ask of the driver: rank 0's is carried out, the others get its answer.

What a user's code made (arguments, values, exceptions) travels as cloudpickle inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.events import EpochDecision
from optuna_fleet.wire.packing import Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """What all calls have.

    Attributes:
        index: Running number of the call within the run; equal on all ranks.
        name: What is called, in words for the user.
        is_awaited: The rank waits for the answer.
    """

    run_id: int
    index: int
    rank: int
    name: str
    is_awaited: bool = True

    def reply(self, value: bytes = b"", error: Raised | None = None) -> Reply:
        """The answer to it: a packed value, or an exception to raise in its place."""
        return Reply(run_id=self.run_id, index=self.index, value=value, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(RankCall):
    """Do something to the real trial, its study or the study's storage.

    Attributes:
        target: "trial", "study" or "storage".
        arguments: Packed positional arguments and keyword arguments.
        is_read: Get the attribute instead of calling it.
    """

    target: str
    arguments: bytes
    is_read: bool = False

    @property
    def is_suggestion(self) -> bool:
        """Whether it asks for a parameter."""
        return self.target == "trial" and self.name.startswith("suggest_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(RankCall):
    """Store an intermediate value; an error comes with the answer to a later call."""

    name: str = "report"
    is_awaited: bool = False
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShouldPrune(RankCall):
    """What the pruner says.

    Attributes:
        last_step: The last one that has led to where the trial is; the study may know later ones.
    """

    name: str = "should_prune"
    last_step: int | None


@dataclass(frozen=True, slots=True)
class AfterEpoch:
    """What a run does after an epoch; `stays` as in `StopAt`, where it yields."""

    decision: EpochDecision
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch(RankCall):
    """The run has done this epoch and asks what to do: answered with `AfterEpoch`.

    Attributes:
        last_step: As of `ShouldPrune`.
    """

    name: str = "end_epoch"
    epoch: int
    last_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IsAmongBest(RankCall):
    """Whether a trial that returns this packed value should leave a checkpoint; of rank 0 only."""

    name: str = "is_among_best"
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a call: a packed value, or an exception to raise in its place."""

    run_id: int
    index: int
    value: bytes = b""
    error: Raised | None = None
