"""What is simulated: an ensemble on a fleet that stays, or a workload on nodes that come and go.

And what came of it, in plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from optuna_fleet.alloc.fluid import Rates, fluid_optimum
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.policies import Policy, policy_of
from optuna_fleet.replay.progress import Outcome, Progress
from optuna_fleet.replay.simulation import Simulation
from optuna_fleet.replay.trace import NodeTrace
from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial, believed_profiles
from optuna_fleet.resources import Device, Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleScenario:
    """An ensemble on a fleet that stays.

    Attributes:
        trials: All of them; those submitted at 0 are known from the start.
        num_devices: Devices of the fleet, or of each device type; a trial flies on one type at a
            time.
        devices_per_node: Of each node but the last one of a type, which may have fewer.
        policy: A name of `POLICIES`, or one of them with options of its own.
        seed: Of random orders and of the noise.
        noise: Standard deviation of the logarithm of (believed / true) rates.
        widest_known: Rates on more devices than this are estimated until a trial first flies on
            so many; 0 if all are measured in the sweep, None if all are known from the start.
        lookahead: Trials that may wait for devices while further ones are proposed, as if their
            models were known; None for all, 0 to propose and to probe as the executor does.
        movable: Trials read ``trial.batches(..., movable=True)``: a policy that can moves them
            within epochs.
        rules: How the world behaves; None for its defaults.
    """

    trials: Sequence[SimulatedTrial]
    num_devices: int | Mapping[str, int]
    devices_per_node: int = 4
    policy: str | Policy = "elastic"
    seed: int = 0
    noise: float = 0.0
    widest_known: int | None = None
    lookahead: int | None = None
    movable: bool = False
    rules: Rules | None = None

    def run(self) -> Outcome:
        """Simulate."""
        named = policy_of(self.policy)
        lookahead = len(self.trials) if self.lookahead is None else self.lookahead
        policy = named.rules(lookahead=lookahead)
        policy = replace(policy, moves_within_epochs=policy.moves_within_epochs and self.movable)
        fleet = self._fleet()
        profiles = believed_profiles(
            self.trials, fleet.kinds, noise=self.noise, seed=self.seed, widest=self.widest_known
        )
        rules = self.rules or Rules(coupled=named.is_coupled)
        allocator = named.new_allocator(self.seed)
        simulation = Simulation(fleet, self.trials, policy, allocator, profiles, rules)
        everything = FleetChange(time_s=0.0, joined=tuple(range(len(fleet))))
        return simulation.run(iter([everything]))

    def _fleet(self) -> Fleet:
        given = self.num_devices
        num_by_kind = given if isinstance(given, Mapping) else {"simulated": given}
        places = [
            (kind, k // self.devices_per_node)
            for kind, total in num_by_kind.items()
            for k in range(total)
        ]
        nodes = {place: node for node, place in enumerate(dict.fromkeys(places))}
        return Fleet(
            devices=tuple(
                Device(index=i, node=nodes[place], kind=place[0]) for i, place in enumerate(places)
            )
        )


def simulation_report(
    run: EnsembleScenario, outcome: Outcome, baseline: Outcome
) -> dict[str, Any]:
    """What came of it, beside the baseline and the lower bound."""
    bound_s = lower_bound_s(run.trials, run.num_devices)
    return {
        "devices": run.num_devices if isinstance(run.num_devices, int) else {**run.num_devices},
        "seed": run.seed,
        **common_report(outcome),
        "lower_bound_s": bound_s,
        "ratio_to_bound": outcome.end_s / bound_s,
        "baseline_s": baseline.end_s,
        "speedup_over_baseline": baseline.end_s / outcome.end_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScenario:
    """A workload on nodes that come and go (BFTrainer, section 4).

    Attributes:
        trace: The nodes.
        trials: In order of submission.
        policy: One that decides at each event: a name of `POLICIES`, or one of them with options.
        max_trials: P_jmax, trials at once, first come first served.
        events: When to decide: also as trials end ("completions"), or only as nodes come and go.
        to_the_end: Go through the trace again until all trials have ended; there is no end where
            one needs more nodes than are ever idle at once.
    """

    trace: NodeTrace
    trials: Sequence[SimulatedTrial]
    policy: str | Policy = "elastic"
    max_trials: int = 10
    events: Literal["completions", "nodes-only"] = "completions"
    to_the_end: bool = False

    def run(self) -> Outcome:
        """Simulate.

        Raises:
            FleetConfigError: The policy does not decide at each event.
        """
        named = policy_of(self.policy)
        if named.paradigm != "elastic":
            raise FleetConfigError(
                f"`policy` has the paradigm {named.paradigm!r}, but nodes that come and go need "
                "one that decides at each event: 'elastic', 'equal-split', or any with 'elastic'."
            )
        policy = named.rules(max_trials=self.max_trials, lookahead=self.max_trials)
        allocator = named.new_allocator(seed=0)
        fleet = self.trace.fleet()
        profiles = believed_profiles(self.trials, fleet.kinds)
        rules = Rules(cost="old rate", seen_at=self.events, coupled=named.is_coupled)
        simulation = Simulation(fleet, self.trials, policy, allocator, profiles, rules)
        until_s = None if self.to_the_end else self.trace.end_s
        changes = self.trace.repeated() if self.to_the_end else iter(self.trace.changes)
        return simulation.run(changes, until_s)


def trace_report(run: TraceScenario, outcome: Outcome) -> dict[str, Any]:
    """What came of it, with BFTrainer's measures."""
    trials = list(outcome.trials.values())
    seconds = min(outcome.end_s, run.trace.end_s)
    nodes = run.trace.mean_nodes(seconds)
    events = int((run.trace.time_s <= outcome.end_s).sum())
    present_s = sum(outcome.present_s.values())
    report = {
        **common_report(outcome),
        "mean_nodes": nodes,
        "events": events,
        "idle_share": _idle_s(outcome) / present_s if present_s else 0.0,
        "preempt_samples_per_event": sum(p.preempt_samples for p in trials) / events,
        "rescale_samples_per_event": sum(p.rescale_samples for p in trials) / events,
    }
    if nodes and outcome.end_s <= run.trace.end_s:
        report["utilisation"] = utilisation(trials, nodes, run.max_trials, seconds)
    return report


def common_report(outcome: Outcome) -> dict[str, Any]:
    """What every report has.

    Returns:
        `makespan_s`; `trials` that ended; `rescales`; `rounds`, plans that were carried out;
        `decisions`; `idle_s` and `waiting_s`, mean seconds per device that was there; `solver_s`
        (median, p99, max, total), the only wall times.
    """
    ended = [p for p in outcome.trials.values() if p.ended_s is not None]
    devices = max(1, len(outcome.present_s))
    times, idle_s = outcome.solve_s or [0.0], _idle_s(outcome)
    return {
        "makespan_s": outcome.end_s,
        "trials": len(ended),
        "rescales": sum(p.rescales for p in outcome.trials.values()),
        "rounds": max((span.round for span in outcome.spans), default=0),
        "decisions": len(outcome.solve_s),
        "idle_s": idle_s / devices,
        "waiting_s": outcome.waited_s / devices,
        "solver_s": {
            "median": float(np.median(times)),
            "p99": float(np.quantile(times, 0.99)),
            "max": float(np.max(times)),
            "total": float(np.sum(times)),
        },
    }


def _idle_s(outcome: Outcome) -> float:
    """Device-seconds in which there were none of the runs; what rounding leaves is none."""
    return max(0.0, round(sum(outcome.present_s.values()) - outcome.busy_s, 6))


def utilisation(
    trials: Sequence[Progress], mean_nodes: float, max_trials: int, seconds: float
) -> float:
    """U of BFTrainer (section 4.1.2, Eq. 17 and 18): outcome over that of a static machine.

    The static machine has as many nodes as were idle on average, N_eq, shared equally by
    ``max_trials`` trials; rates between table entries are linear. Each model's samples count as
    the node-seconds they take there, so unlike models add up.

    Args:
        trials: Their samples are net of what moves and losses cost.
        mean_nodes: N_eq.
        max_trials: Trials at once.
        seconds: Length of the replay.

    Returns:
        A share; 1 is as good as the static machine.
    """
    share = mean_nodes / max_trials
    node_s = 0.0
    for progress in trials:
        rates = (0.0, *progress.trial.rates)
        node_s += progress.samples / float(np.interp(share, range(len(rates)), rates)) * share
    return node_s / (mean_nodes * seconds)


def lower_bound_s(trials: Sequence[SimulatedTrial], num_devices: int | Mapping[str, int]) -> float:
    """No schedule is shorter, however clever: moves are free, and every length is known.

    With several device types each trial trains as fast as on those that suit it best, wherever
    it is: there the bound is not as sharp.

    Args:
        trials: At least one.
        num_devices: Devices of the fleet, or of each device type.

    Returns:
        Seconds: the fluid optimum of all the work, or the latest a trial can end that starts as it
        is submitted and flies alone.
    """
    num_by_kind = num_devices if isinstance(num_devices, Mapping) else {"": num_devices}
    total = sum(num_by_kind.values())
    rates = [_best_rates(t, num_by_kind, total) for t in trials]
    fluid_s, _ = fluid_optimum(rates, [t.work for t in trials], total)
    alone = (t.submit_s + t.work / max(own) for t, own in zip(trials, rates, strict=True))
    return max(fluid_s, *alone)


def _best_rates(trial: SimulatedTrial, num_by_kind: Mapping[str, int], total: int) -> Rates:
    """Of each number of devices, on those of as many that suit it best."""
    most = total if trial.spans_types else max(num_by_kind.values())
    widths = range(1, min(most, len(trial.rates)) + 1)
    return tuple(_best_rate(trial, m, num_by_kind) for m in widths)


def _best_rate(trial: SimulatedTrial, m: int, num_by_kind: Mapping[str, int]) -> float:
    if not trial.spans_types:
        return max(trial.rates_on(kind)[m - 1] for kind, n in num_by_kind.items() if n >= m)
    chosen: dict[str, int] = {}
    for kind in sorted(num_by_kind, key=lambda kind: -trial.rates_on(kind)[m - 1]):
        chosen[kind] = min(num_by_kind[kind], m - sum(chosen.values()))
    return trial.rate_on(chosen)
