"""The two simulations of the command line: an ensemble on a fleet, and a workload on a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from optuna_fleet.alloc import Allocator, EqualSplitAllocator
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.policies import POLICIES, Policy, policy_of
from optuna_fleet.replay.report import common_report, lower_bound_s, utilisation
from optuna_fleet.replay.simulation import Outcome, Simulation
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
        allocator: Instead of the policy's own.
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
    allocator: Allocator | None = None
    lookahead: int | None = None
    movable: bool = False
    rules: Rules | None = None

    def run(self) -> Outcome:
        """Simulate."""
        named = policy_of(self.policy)
        lookahead = len(self.trials) if self.lookahead is None else self.lookahead
        allocator = self.allocator or named.new_allocator(self.seed)
        policy = named.rules(lookahead=lookahead)
        policy = replace(policy, moves_within_epochs=policy.moves_within_epochs and self.movable)
        fleet = self._fleet()
        profiles = believed_profiles(
            self.trials, fleet.kinds, noise=self.noise, seed=self.seed, widest=self.widest_known
        )
        rules = self.rules or Rules(coupled=named.is_coupled)
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
        "policy": _name_of(run.policy),
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
        published_heuristic: The equal split as published, with its flaw.
        to_the_end: Go through the trace again until all trials have ended.
    """

    trace: NodeTrace
    trials: Sequence[SimulatedTrial]
    policy: str | Policy = "elastic"
    max_trials: int = 10
    events: Literal["completions", "nodes-only"] = "completions"
    published_heuristic: bool = False
    to_the_end: bool = False

    def run(self) -> Outcome:
        """Simulate.

        Raises:
            FleetConfigError: It is to go on to the end, but a trial never has nodes enough; or the
                policy does not decide at each event.
        """
        self._check_end()
        named = policy_of(self.policy)
        if named.paradigm != "elastic":
            raise FleetConfigError(
                f"`policy` is {_name_of(named)!r}, but nodes that come and go need one that "
                "decides at each event: 'elastic', 'equal-split', or any with paradigm 'elastic'."
            )
        policy = named.rules(max_trials=self.max_trials, lookahead=self.max_trials)
        allocator = named.new_allocator(seed=0)
        if self.published_heuristic:
            allocator = EqualSplitAllocator(published=True)
        fleet = self.trace.fleet()
        profiles = believed_profiles(self.trials, fleet.kinds)
        rules = Rules(cost="old rate", seen_at=self.events, coupled=named.is_coupled)
        simulation = Simulation(fleet, self.trials, policy, allocator, profiles, rules)
        until_s = None if self.to_the_end else self.trace.end_s
        return simulation.run(self.trace.changes(repeats=self.to_the_end), until_s)

    def _check_end(self) -> None:
        needed, most = max(t.min_devices for t in self.trials), self.trace.most_nodes()
        if self.to_the_end and needed > most:
            raise FleetConfigError(
                f"`to_the_end` is set, but a trial needs {needed} nodes, and never more than "
                f"{most} are idle at once."
            )


def trace_report(run: TraceScenario, outcome: Outcome) -> dict[str, Any]:
    """What came of it, with BFTrainer's measures."""
    trials = list(outcome.trials.values())
    seconds = min(outcome.end_s, run.trace.end_s)
    nodes = run.trace.mean_nodes(seconds)
    events = int((run.trace.time_s <= outcome.end_s).sum())
    report = {
        "policy": _name_of(run.policy),
        **common_report(outcome),
        "mean_nodes": nodes,
        "events": events,
        "idle_share": _idle_share(outcome),
        "preempt_samples_per_event": sum(p.preempt_samples for p in trials) / events,
        "rescale_samples_per_event": sum(p.rescale_samples for p in trials) / events,
    }
    if nodes and outcome.end_s <= run.trace.end_s:
        report["utilisation"] = utilisation(trials, nodes, run.max_trials, seconds)
    return report


def _idle_share(outcome: Outcome) -> float:
    present = sum(outcome.totals.present_s.values())
    return 1 - sum(outcome.totals.busy_s.values()) / present if present else 0.0


def _name_of(policy: str | Policy) -> str:
    kinds = {kind: name for name, kind in POLICIES.items()}
    return policy if isinstance(policy, str) else kinds.get(type(policy), type(policy).__name__)
