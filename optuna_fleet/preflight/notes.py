"""What a rehearsal is told, and what it notes: plain data, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.study import Study, StudyDirection

from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.preflight.verdict import Key
from optuna_fleet.wire.node_messages import StoreReady


@dataclass(frozen=True, slots=True)
class Sketch:
    """Numbers, small enough to be kept, and equal if all of them are.

    Attributes:
        digest: Of all.
        shape: Of the tensor.
        numbers: The same; of many, sums of parts of them with random signs.
        largest: The largest number's absolute value.
    """

    digest: bytes
    shape: tuple[int, ...] = field(compare=False)
    numbers: npt.NDArray[np.float64] = field(compare=False)
    largest: float = field(compare=False)


Value: TypeAlias = Sketch | str | None
Record: TypeAlias = dict[Key, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rehearse an objective as one rank.

    Attributes:
        objective_at: Where it is.
        objective_id: Which it is there.
        params: What is suggested; None for what is drawn.
        study: See `facts_of`.
        seed: As of `RunTrial`.
        spec: Of the data sets; None if there are none.
        payload: These.
        num_threads: To compute with.
        is_double: All in float64.
        moves: It is moved at each mini-epoch's end, and in the midst of movable passes.
        is_nudged: Parameters are changed as little as rounding does.
        num_batches: So many, and a part of one, in each pass over training data.
        store: Where several ranks find each other.
    """

    objective_at: str
    objective_id: int
    params: Mapping[str, Any] | None
    study: Mapping[str, Any]
    seed: int
    spec: PipelineSpec | None = None
    payload: Payload | None = None
    num_threads: int = 1
    is_double: bool = True
    moves: bool = False
    is_nudged: bool = False
    num_batches: int = 2
    rank: int = 0
    world_size: int = 1
    store: StoreReady | None = None

    @property
    def maximize(self) -> bool | None:
        """As of `RunTrial`."""
        directions = self.study["directions"]
        return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None


def facts_of(study: Study) -> dict[str, Any]:
    """What an objective may ask its study for."""
    names = "study_name", "user_attrs", "directions"
    return {name: getattr(study, name) for name in names} | {"direction": study.directions[0]}


class Ending(Enum):
    """How a rehearsal ended: at the end of the last loop, or otherwise."""

    LEFT = "left"
    RETURNED = "returned"
    RAISED = "raised"
    UNFIT = "unfit"  # it can't be checked
    PLAIN = "plain"  # it prepares nothing
    CUT_OFF = "cut off"  # its peers have ended
    DIED = "died"
    LATE = "late"


@dataclass(slots=True, kw_only=True)
class Rehearsed:
    """What a rank has noted, and how far it is; goes on over moves.

    Attributes:
        ending: How it ended.
        problem: Why it ended so, in a sentence.
        traceback: If it has raised.
        record: What there was.
        params: What was suggested; of choices that are objects the position.
        num_steps: Of optimizers.
        num_epochs: Mini-epochs begun.
        sizes: Those of the batches that were read.
        refused: Why it could not be moved.
        is_rough: Numbers of less precision than float32 were computed.
        wall_s: What its process took.
        cpu_s: Likewise.
        user_attrs: Set so far.
        num_passes: Over batches.
        num_moves: How often it was moved.
        place: Loop and mini-epoch.
        step: The optimizers', in that.
        moved_within: The mini-epoch in whose midst it was last to be moved.
    """

    ending: Ending = Ending.RETURNED
    problem: str = ""
    traceback: str = ""
    record: Record = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    num_epochs: int = 0
    sizes: set[int] = field(default_factory=set)
    refused: str = ""
    is_rough: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    user_attrs: dict[str, Any] = field(default_factory=dict)
    num_passes: int = 0
    num_moves: int = 0
    place: tuple[int, int] = (0, 0)
    step: int = 0
    moved_within: tuple[int, int] = (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return self.ending in (Ending.LEFT, Ending.RETURNED)
