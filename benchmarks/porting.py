"""Four users' scripts before and after: Optuna alone, with `executor=` alone, and ported.

python benchmarks/porting.py  # 20 trials each, 3 rounds; a quarter of an hour on 2 quiet cores
python benchmarks/porting.py --trials 2 --rounds 1 --only folds

The scripts are those of examples/ports, run from `python` to their end, with one thread per
process. All three of a script train trials with the same parameters, none is pruned; Optuna alone
trains one after the other. Which goes first changes from round to round. Prints the table of
docs/comparison.md. Lines are counted here, by difflib.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import runpy
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pairing import Cost, note, ratios, run

PORTS = Path(__file__).resolve().parents[1] / "examples" / "ports"
SCRIPTS = {
    "vision": ("Vision with EMA and mixup", "pytorch_vision_simple", "pytorch_vision_fleet"),
    "lightning": ("Lightning", "pytorch_lightning_simple", "pytorch_lightning_fleet"),
    "folds": ("k-fold, two objectives", "pytorch_folds_simple", "pytorch_folds_fleet"),
    "transformers": ("Hugging Face's Trainer", "transformers_simple", "transformers_fleet"),
}
SIDES = ("plain", "unchanged", "ported")
OF = ("wall_s", "cpu_s")


# -- lines --------------------------------------------------------------------------------------


def code_of(port: str, *, plain: bool = False) -> list[str]:
    """Its lines but for the docstring and blank ones; `plain`: as it is for Optuna alone."""
    code = (PORTS / f"{port}.py").read_text().split('"""', 2)[2]
    lines = [line for line in code.splitlines() if line.strip()]
    if not plain:
        return lines
    lines = [line for line in lines if "FleetExecutor" not in line]
    return [line.replace(", executor=executor", "") for line in lines]


def changed_lines(before: list[str], after: list[str]) -> tuple[int, int]:
    """Lines that are new or edited, and lines that are gone."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    added = sum(end - begin for _, _, _, begin, end in edits)
    return added, sum(max(0, (b - a) - (d - c)) for _, a, b, c, d in edits)


def changes(simple: str, fleet: str) -> dict[str, tuple[int, int]]:
    """What each side has changed since Optuna alone."""
    plain = code_of(simple, plain=True)
    return {
        "plain": (0, 0),
        "unchanged": changed_lines(plain, code_of(simple)),
        "ported": changed_lines(plain, code_of(fleet)),
    }


# -- times --------------------------------------------------------------------------------------


def run_port(port: str, num_trials: str, params: str) -> None:
    """Run a port in this process, as its user would; print its trials' parameters."""
    import optuna

    studies, create_study = [], optuna.create_study

    def create(**options: Any) -> optuna.Study:
        sampler, pruner = optuna.samplers.RandomSampler(seed=0), optuna.pruners.NopPruner()
        studies.append(create_study(**options, sampler=sampler, pruner=pruner))
        for wanted in json.loads(params):
            studies[0].enqueue_trial(wanted)
        return studies[0]

    optuna.create_study = create
    sys.path.insert(0, str(PORTS))
    name, *options = port.split()
    sys.argv = [f"{name}.py", "--trials", num_trials, *options]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runpy.run_path(str(PORTS / sys.argv[0]), run_name="__main__")
    completed = studies[0].get_trials(states=[optuna.trial.TrialState.COMPLETE])
    print(json.dumps([trial.params for trial in completed]))


def measure(simple: str, fleet: str, num_trials: int, rounds: int) -> dict[str, list[Cost]]:
    """The three sides in turn; the parameters are those that the first of all has drawn."""
    ports = {"plain": simple, "unchanged": f"{simple} --fleet", "ported": fleet}
    costs: dict[str, list[Cost]] = {side: [] for side in SIDES}
    params: list[Any] = []
    for number in range(rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            load = os.getloadavg()[0]
            cost = run((__file__, "--run", ports[side], num_trials, json.dumps(params)))
            params = params or cost.answers[0]
            assert cost.answers[0] == params
            costs[side].append(cost)
            note(f"{ports[side]}: {cost.wall_s:.1f} s; the load before it was {load:.1f}")
    return costs


# -- the table ----------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> str:
    """Their median, with the smallest and the largest."""
    found = sorted(values)
    shown = [f"{value:.3g}" for value in (statistics.median(found), found[0], found[-1])]
    return shown[0] if len(found) == 1 else "{} ({} .. {})".format(*shown)


def table_row(what: str, side: str, changed: tuple[int, int], costs: dict[str, list[Cost]]) -> str:
    """One side of one script, beside Optuna alone."""
    wall, cpu = ([[getattr(c, of) for c in costs[s]] for s in (side, "plain")] for of in OF)
    cells = [what, "", spread(wall[0]), spread(cpu[0]), "", ""]
    if side != "plain":
        cells[1] = f"{changed[0]} new or edited, {changed[1]} gone"
        cells[4:] = spread(ratios(*wall)), spread(ratios(*cpu))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run_port(*given.run)
        return
    rows = []
    for name, simple, fleet in (SCRIPTS[script] for script in given.only):
        costs, changed = measure(simple, fleet, given.trials, given.rounds), changes(simple, fleet)
        for side, port in zip(SIDES, (simple, simple, fleet), strict=True):
            link = f"[{name}](../examples/ports/{port}.py): {side}"
            rows.append(table_row(link, side, changed[side], costs))
    print("| script | lines of code | seconds | CPU seconds | time / plain's | CPU / plain's |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
