"""How far from the optimum each policy's schedules are, on reconstructed ensembles of FLEET.

python benchmarks/schedule.py --policies elastic        # held-out seeds 0-19, 20 CPU minutes
python benchmarks/schedule.py --policies baseline homogeneous fleet-g fleet-l mip --seeds 0-4
python benchmarks/schedule.py --policies elastic --variants wrong-rates cheap-moves --seeds 0-9

Each number is the simulated makespan over a lower bound that no schedule can beat: moves cost
nothing there, all lengths are known, devices are divisible. Everything is pure CPU, and
deterministic but for "mip", whose decisions may end at a time limit; it is run on the first two
seeds only. What can be tuned was tuned on seeds 100-109.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ensembles import RESCALE_S, STORIES, ensemble

from optuna_fleet.replay.scenarios import EnsembleScenario, lower_bound_s
from optuna_fleet.replay.workload import Rules, pruned_after

POLICIES = ("baseline", "homogeneous", "fleet-g", "fleet-l", "mip", "elastic")
DEVICES = tuple(range(20, 161, 20))
MOST_SEEDS = {"mip": 2}

VARIANTS = {
    "wrong-rates": "rates the policy believes are wrong by 10 % (standard deviation, each width)",
    "cheap-moves": "each move costs 10 s instead of 34 s",
    "pruned": "at each epoch's end a trial is pruned with probability 0.05",
    "bounded": "trials say how many epochs they do at most, as by `trial.epochs(n)`",
    "bounded-pruned": "both",
    "rates-in-flight": "only r(1) is known at first, r(m) once a trial has flown on m devices",
    "known-lengths": "elastic is told how many epochs a trial will need, at the end of each",
}
_DEVICES_PER_NODE = 4
_NOISE, _CHEAP_MOVE_S, _PRUNED = 0.1, 10.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated sweep."""

    story: str
    policy: str
    num_devices: int
    seed: int
    variant: str = "plain"


def simulate(case: Case) -> float:
    """Makespan / lower bound of one case."""
    rescale_s = _CHEAP_MOVE_S if case.variant == "cheap-moves" else RESCALE_S
    trials = ensemble(case.story, case.seed, case.num_devices, rescale_s)
    if case.variant.startswith("bounded"):
        trials = tuple(replace(trial, max_epochs=trial.epochs) for trial in trials)
    if case.variant.endswith("pruned"):
        trials = tuple(
            pruned_after(trial, _PRUNED, [case.seed, k]) for k, trial in enumerate(trials)
        )
    if case.variant == "known-lengths":
        trials = tuple(replace(trial, predicted_epochs=float(trial.epochs)) for trial in trials)
    outcome = EnsembleScenario(
        trials=trials,
        num_devices=case.num_devices,
        devices_per_node=_DEVICES_PER_NODE,
        policy=case.policy,
        seed=case.seed,
        noise=_NOISE if case.variant == "wrong-rates" else 0.0,
        widest_known=1 if case.variant == "rates-in-flight" else None,
    ).run()
    return outcome.end_s / lower_bound_s(trials, case.num_devices)


def profiling_share(story: str, seed: int, num_devices: int) -> float:
    """Share of all device time that FLEET's profiling of all widths beforehand takes (B.3)."""
    trials = ensemble(story, seed, num_devices)
    single = [trial.rates[0] for trial in trials]
    reach_fastest = math.ceil(max(single) / min(single))  # M_a of B.3; M_b is two nodes
    widest = min(num_devices, max(reach_fastest, 2 * _DEVICES_PER_NODE))
    samples = Rules().profile_samples
    profiled_s = sum(m * samples / r for t in trials for m, r in enumerate(t.rates[:widest], 1))
    return profiled_s / (num_devices * lower_bound_s(trials, num_devices))


def simulate_all(cases: Iterable[Case], num_processes: int) -> dict[Case, float]:
    """Run all cases, as many at once as there are processes."""
    distinct = list(dict.fromkeys(cases))
    if num_processes == 1:
        return {case: simulate(case) for case in distinct}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        return dict(zip(distinct, pool.map(simulate, distinct, chunksize=1), strict=True))


# -- tables -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy on all seeds of a story, on so many devices."""

    story: str
    policy: str
    variant: str
    num_devices: int
    runs: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of makespan / bound."""
        return statistics.fmean(self.runs)

    @property
    def worst(self) -> float:
        """Makespan / bound of the worst seed."""
        return max(self.runs)

    @property
    def over_plain(self) -> float:
        """Mean over the seeds of (makespan / bound) / that of the plain run."""
        pairs = zip(self.runs, self.plain, strict=True)
        return statistics.fmean(run / plain for run, plain in pairs)


def cells(
    results: dict[Case, float], rows: Iterable[tuple[str, str, str]], options: argparse.Namespace
) -> Iterator[Cell]:
    """All cells, row by row of (story, policy, variant)."""
    for story, policy, variant in rows:
        for num_devices in options.devices:
            plain = _cases(story, policy, num_devices, options.seeds)
            yield Cell(
                story=story,
                policy=policy,
                variant=variant,
                num_devices=num_devices,
                runs=tuple(results[replace(case, variant=variant)] for case in plain),
                plain=tuple(results[case] for case in plain if case in results),
            )


def print_table(all_cells: Sequence[Cell], devices: Sequence[int]) -> None:
    """Print one row per story, policy and variant: mean (worst seed) by devices."""
    print("\nMakespan / lower bound, mean (worst seed)" + _ratio_note(all_cells))
    print(f"\n| story | policy | seeds | {' | '.join(f'M={m}' for m in devices)} |")
    print("|---" * (len(devices) + 3) + "|")
    for start in range(0, len(all_cells), len(devices)):
        row = all_cells[start : start + len(devices)]
        first = row[0]
        name = first.policy if first.variant == "plain" else f"{first.policy}, {first.variant}"
        shown = " | ".join(map(_shown, row))
        print(f"| {first.story} | {name} | {len(first.runs)} | {shown} |")


def _ratio_note(all_cells: Sequence[Cell]) -> str:
    variants = {cell.variant for cell in all_cells}
    notes = [
        f"{name}: {what}; after x: over the plain run, mean"
        for name, what in VARIANTS.items()
        if name in variants
    ]
    if "rates-in-flight" in variants:
        widths = {cell.num_devices for cell in all_cells}
        shares = [profiling_share(story, 0, m) for story in STORIES for m in widths]
        notes.append(
            "to profile all widths beforehand (FLEET, B.3) would take "
            f"{min(shares):.1%} to {max(shares):.1%} of the devices' time (seed 0)"
        )
    return "".join(f"\n- {note}" for note in notes)


def _shown(cell: Cell) -> str:
    text = f"{cell.mean:.3f} ({cell.worst:.3f})"
    return text if cell.variant == "plain" else f"{text} x {cell.over_plain:.3f}"


# -- command line -----------------------------------------------------------------------------


def _cases(story: str, policy: str, num_devices: int, seeds: Sequence[int]) -> list[Case]:
    return [
        Case(story=story, policy=policy, num_devices=num_devices, seed=seed)
        for seed in seeds[: MOST_SEEDS.get(policy)]
    ]


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Callable[..., object] = parser.add_argument
    add("--story", choices=STORIES, nargs="+", default=["A", "B"], dest="stories")
    add("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    add("--devices", type=int, nargs="+", default=list(DEVICES))
    add("--seeds", type=_seeds, default=_seeds("0-19"), metavar="FIRST-LAST")
    add("--variants", choices=VARIANTS, nargs="+", default=[], help="in addition to the plain run")
    add("--processes", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    options = _options()
    variants = ["plain", *options.variants]
    rows = [(s, p, v) for s in options.stories for p in options.policies for v in variants]
    cases = [
        replace(case, variant=variant)
        for story, policy, variant in rows
        for num_devices in options.devices
        for case in _cases(story, policy, num_devices, options.seeds)
    ]
    all_cells = list(cells(simulate_all(cases, options.processes), rows, options))
    print_table(all_cells, options.devices)


if __name__ == "__main__":
    main()
