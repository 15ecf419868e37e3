"""The simulated runs: how far each trial is, when its next epoch ends, what all came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from optuna_fleet.events import PreprocessingMeasured
from optuna_fleet.replay.workload import Rules, SimulatedTrial


@dataclass(slots=True, kw_only=True)
class Progress:
    """What became of one trial so far.

    Attributes:
        samples: Samples trained, less what moves cost.
        num_by_kind: How many devices of each type it had last (none before its first start).
        begun_s: First start, in seconds.
        ended_s: End, in seconds.
        landed_s: When its last run ended, in seconds.
        rescales: Moves to other devices that were charged.
        rescale_samples: What moves cost, in samples.
        preempt_samples: What losses of devices cost, in samples.
    """

    trial: SimulatedTrial
    samples: float = 0.0
    epochs_done: int = 0
    num_by_kind: Mapping[str, int] = field(default_factory=dict)
    begun_s: float | None = None
    ended_s: float | None = None
    landed_s: float | None = None
    rescales: int = 0
    rescale_samples: float = 0.0
    preempt_samples: float = 0.0


@dataclass(slots=True, kw_only=True)
class SimulatedRun:
    """A run in the air; `version` changes with its pace, to tell outdated epoch ends."""

    run_id: int
    number: int
    devices: tuple[int, ...]
    progress: Progress
    launched_s: float
    rate: float
    pace: float
    since_s: float
    round: int
    samples_before: float
    waits: bool = False
    version: int = 0
    waited_device_s: float = 0.0

    def advance(self, now: float) -> None:
        """Counts what was trained up to now."""
        elapsed = now - self.since_s
        self.since_s = now
        if self.waits:
            return
        self.progress.samples += self.pace * elapsed
        self.waited_device_s += elapsed * len(self.devices) * (1 - self.pace / self.rate)

    def epoch_end_s(self) -> float:
        """When its epoch will end at its present pace."""
        trial = self.progress.trial
        target = (self.progress.epochs_done + 1) * trial.samples_per_epoch
        return self.since_s + (target - self.progress.samples) / self.pace


def capacity(flights: Iterable[SimulatedRun], made_per_s: float) -> PreprocessingMeasured:
    """What a sweep would measure, whose trials share what is made: see `Capacity`."""
    paces = [flight.pace for flight in flights]
    busy_share = max(paces, default=0.0) / made_per_s
    return PreprocessingMeasured(samples_per_s=sum(paces) / busy_share if busy_share else None)


def charge_start(
    progress: Progress, num_by_kind: Mapping[str, int], now: float, rules: Rules
) -> None:
    """Charges a trial for going on on so many devices of each type now; see :class:`Rules`.

    To change the types costs no less than to get more devices.
    """
    trial = progress.trial
    width, before = sum(num_by_kind.values()), sum(progress.num_by_kind.values())
    is_same = num_by_kind.keys() == progress.num_by_kind.keys()
    if rules.cost == "stall":
        is_free, rated_at = progress.begun_s is None, num_by_kind
    else:
        stays = width == before and is_same
        is_free = stays or before == 0 or progress.landed_s != now
        rated_at = progress.num_by_kind
    if is_free:
        return
    seconds = trial.rescale_down_s if width < before and is_same else trial.rescale_up_s
    lost = seconds * trial.rate_on(rated_at)
    progress.samples -= lost
    progress.rescale_samples += lost
    progress.rescales += 1


def charge_loss(progress: Progress, left: Mapping[str, int], rules: Rules) -> None:
    """Charges a trial that lost devices and has so many of each type left."""
    if rules.cost == "old rate":
        lost = progress.trial.rescale_down_s * progress.trial.rate_on(progress.num_by_kind)
        progress.samples -= lost
        progress.preempt_samples += lost
        progress.num_by_kind = left


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run that has ended; `samples` are net of what its start and its losses cost."""

    number: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    round: int
    has_returned: bool
    samples: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        end_s: When the last trial ended, or the simulation was stopped.
        trials: Progress of each trial that was proposed, by number.
        spans: The runs, by their end.
        present_s: Seconds each device was there.
        waited_s: Device-seconds in which runs held back for slower ones of their flotilla.
        solve_s: Wall time of each decision.
        checked: Traits that each pre-flight check was of.
    """

    end_s: float = 0.0
    trials: dict[int, Progress] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    present_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    waited_s: float = 0.0
    solve_s: list[float] = field(default_factory=list)
    checked: list[frozenset[str]] = field(default_factory=list)

    @property
    def busy_s(self) -> float:
        """Device-seconds in which there were runs."""
        return sum(len(span.devices) * (span.end_s - span.start_s) for span in self.spans)

    def add_run(self, flight: SimulatedRun, now: float) -> None:
        """A run ends now."""
        self.waited_s += flight.waited_device_s
        self.spans.append(
            Span(
                number=flight.number,
                devices=flight.devices,
                start_s=flight.launched_s,
                end_s=now,
                round=flight.round,
                has_returned=flight.progress.ended_s is not None,
                samples=flight.progress.samples - flight.samples_before,
            )
        )
