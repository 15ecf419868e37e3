"""What a check has found, and what it tells the user."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

KINDS = (
    *("gradient", "learning rate", "buffer", "trial.state", "optimizer state"),
    *("parameter", "state of the object", "total", "variable", "reported value"),
)
"""Of what is noted; of several at one moment the first causes the others."""

BEGIN, END = 0, 1 << 20
"""As moments: the beginning of a mini-epoch, and its end."""


class Key(NamedTuple):
    """What was noted when: loop from 1, mini-epoch, and a step of it from 1, `BEGIN` or `END`."""

    loop: int
    epoch: int
    moment: int
    kind: str
    name: str  # as the user wrote it

    @property
    def order(self) -> tuple[int, int, int, int]:
        """To sort by: in the order of time, and causes first."""
        return self.loop, self.epoch, self.moment, KINDS.index(self.kind)


Differences: TypeAlias = Mapping[Key, float]
"""By what part of the largest number of its kind; infinite where it is of another kind."""


def _first(differences: Differences) -> str:
    """The first of them, in words."""
    key, size = next(iter(differences.items()))
    where = "at the end" if key.moment == END else f"in step {key.moment}"
    by = f" by {size:.2g} of the largest" if size < math.inf else ""
    return f"the {key.kind} `{key.name}` differs{by} {where} of mini-epoch {key.epoch + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has found of a kind of trials, which has these traits; see `Model.traits`.

    Attributes:
        widens: They give the same on several devices.
        moves: They give the same wherever they go on.
        began_anew: What does not, where they go on all the same; "" if that is not known.
    """

    traits: frozenset[str]
    widens: bool
    moves: bool
    began_anew: str = ""


class Outcome(Enum):
    """What trials like the checked one may have."""

    FREE = "any devices"
    NOT_MOVED = "no moves"
    ONE_DEVICE = "one device"
    NOT_REPEATABLE = "not repeatable"  # on one device: there is nothing to compare with
    NOT_CHECKED = "not checked"
    PLAIN = "plain"  # it prepares nothing


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """What trials like the checked one may do; `print` it.

    Attributes:
        outcome: In a word.
        differences: Of several devices from one, or of two runs on one, in the order of time.
        problem: How the run on several has failed, or why nothing was checked.
        traceback: Of an objective that has raised on one device.
        moved: What is not as it would be without moves; causes first.
        not_moved: Why it could not be moved at all.
        worst: The largest difference of several devices that was let pass.
        params: That the checked trial had.
        wall_s: What the check took.
    """

    outcome: Outcome
    differences: Differences = field(default_factory=dict)
    problem: str = ""
    traceback: str = ""
    moved: Differences = field(default_factory=dict)
    not_moved: str = ""
    worst: float = 0.0
    params: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def may_widen(self) -> bool:
        """Whether it gives the same on several devices."""
        return self.outcome in (Outcome.FREE, Outcome.NOT_MOVED)

    @property
    def may_move(self) -> bool:
        """Whether it gives the same wherever it goes on."""
        was_moved = self.outcome in (Outcome.FREE, Outcome.ONE_DEVICE)
        return was_moved and not (self.moved or self.not_moved)

    def finding(self, traits: frozenset[str]) -> Finding:
        """What it says of trials that have these traits."""
        return Finding(
            traits=traits,
            widens=self.may_widen,
            moves=self.may_move,
            began_anew=self._of_moves(),
        )

    def told(self) -> tuple[str, str]:
        """What was found, in a few words, and how it is mended, if it has to be."""
        moves, keep = self._of_moves(), _KEEP if self.moved and not self.not_moved else ""
        match self.outcome:
            case Outcome.NOT_MOVED:
                return f"the same on several devices, but not moved: {moves}", keep
            case Outcome.ONE_DEVICE:
                what = _first(self.differences) if self.differences else self.problem
                nor = f"; nor is it moved: {moves}" if moves else ""
                advice = [_usual_reason(key) for key in [*self.differences][:1]]
                return f"one device: on several {what}{nor}", " ".join([*advice, keep]).strip()
            case Outcome.NOT_REPEATABLE:
                what = _first(self.differences) if self.differences else "it fails"
                return f"not repeatable on one device: run again, {what}", _SEED
            case Outcome.NOT_CHECKED:
                return f"not checked, and so one device: {self.problem}", self.traceback
            case Outcome.PLAIN:
                return "plain: one device, as it prepares nothing (`trial.prepare`)", ""
        return "the same on any devices, and over moves", ""

    def _of_moves(self) -> str:
        if self.not_moved or not self.moved:
            return self.not_moved
        if next(iter(self.moved)).kind != "variable":
            return f"after a move {_first(self.moved)}, as something begins anew"
        names = (one.name for one in self.moved if one.kind == "variable")
        roots = (name.removeprefix("len(").removesuffix(")").partition("[")[0] for name in names)
        found = list(dict.fromkeys(f"`{root}`" for root in roots))
        return f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''} would begin anew"

    def __repr__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        finding, advice = self.told()
        of = f" ({params})" if params else ""
        took = f"The check took {self.wall_s:.1f} s."
        lines = [f"Pre-flight check{of}: {finding}", advice, took]
        return "\n  ".join(filter(None, lines))


def _usual_reason(first: Key) -> str:
    """What usually makes several devices differ, by what differs first, and when."""
    if first.kind == "gradient" and (first.epoch, first.moment) == (0, 1):
        return _LOSS
    return _REASONS.get(first.kind, _KEPT)


_LOSS = (
    "From the first step on: a loss that is no plain mean over the samples (class weights, a mean "
    "over tokens, pairs of samples: see trial.weighted), or gradients that are given by hand."
)
_KEPT = (
    "The first step is the same: something is kept from batch to batch that follows each device's "
    "own samples (a queue, a codebook, a running mean), or a loss that comes later is no plain "
    "mean over the samples: sum over the devices (trial.sum, trial.mean, trial.weighted)."
)
_SUM = (
    "The training is the same, but not what is reported: each device has seen its part only. Add "
    "up with trial.sum(...) and divide by the number of samples, or weigh: trial.mean(value, "
    "weight=trial.shard_size)."
)
_STATE = (
    "Each device has filled trial.state from its own samples: sum or average over the devices "
    "(trial.sum, trial.mean) what goes there."
)
_REASONS = {"reported value": _SUM, "total": _SUM, "trial.state": _STATE}
_KEEP = (
    "Keep such things in trial.state, or trial.totals, prepare objects (trial.prepare), make what "
    "modules keep buffers, or use trial.best_value and trial.should_stop(...)."
)
_SEED = (
    "Something is drawn that is not seeded, or depends on time or on threads: without that there "
    "is nothing to compare with."
)
