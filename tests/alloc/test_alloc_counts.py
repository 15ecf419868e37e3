"""The count problem: every way to solve it finds the same optimum."""

import itertools
import math

import mip
import numpy as np
import pytest
from bftrainer_model import Trainer, published_optimum
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.counts import CountProblem, Counts, solve_exactly
from optuna_fleet.alloc.counts_mip import solve_by_mip
from optuna_fleet.alloc.problem import AllocationFailed

INF = np.inf


def of_one_kind(*rows, capacity):
    values = tuple(np.array([row], dtype=np.float64) for row in rows)
    return CountProblem(values=values, capacities=(capacity,))


def worth_of(problem, widths):
    """Sum of the values of ``widths``, which must fit together."""
    used = [sum(n for kind, n in widths if kind == k) for k in range(problem.num_kinds)]
    assert all(u <= c for u, c in zip(used, problem.capacities, strict=True))
    return math.fsum(v[chosen] for v, chosen in zip(problem.values, widths, strict=True))


def brute_force(problem):
    """The largest sum of values; tries everything that is admissible."""
    options = [
        [(k, n) for k, n in np.ndindex(v.shape) if v[k, n] > -INF and (n or not k)]
        for v in problem.values
    ]
    best = -INF
    for widths in itertools.product(*options):
        used = [sum(n for k, n in widths if k == kind) for kind in range(problem.num_kinds)]
        if all(u <= c for u, c in zip(used, problem.capacities, strict=True)):
            best = max(best, worth_of(problem, widths))
    return best


def textbook_dp(problem):
    """The same for one kind by the plainest dynamic programming."""
    (capacity,) = problem.capacities
    best = np.zeros(capacity + 1)
    for values in problem.values:
        after = np.full(capacity + 1, -INF)
        for n, value in enumerate(values[0][: capacity + 1]):
            after[n:] = np.maximum(after[n:], best[: capacity + 1 - n] + value)
        best = after
    return best[capacity]


def check(problem, counts, best):
    assert counts.status == "optimal"
    assert all(kind == 0 for kind, n in counts.widths if n == 0)
    scale = sum(float(np.abs(v[v > -INF]).max()) for v in problem.values)
    worth = worth_of(problem, counts.widths)
    assert worth == pytest.approx(best, rel=1e-9, abs=1e-12 * scale)


worths = st.integers(-8, 40).map(lambda n: n / 4) | st.floats(-5, 5, width=32) | st.just(-INF)


@st.composite
def problems(draw, max_trials, max_width, max_devices, num_kinds=1):
    width = st.integers(0, max_width)
    values = []
    for _ in range(draw(st.integers(0, max_trials))):
        if values and draw(st.integers(0, 3)) == 0:  # twins
            values.append(draw(st.sampled_from(values)).copy())
            continue
        shape = (num_kinds, draw(width) + 1)
        size = shape[0] * shape[1]
        table = np.array(draw(st.lists(worths, min_size=size, max_size=size))).reshape(shape)
        table[:, 0] = draw(st.sampled_from([0.0, 0.0, -3.0, 7.5]))
        if draw(st.booleans()):  # rather as rates are
            table = table[:, :1] + np.cumsum(np.abs(table - table[:, :1]), axis=1)
            table[np.isinf(table)] = -INF
        values.append(table)
    capacities = tuple(draw(st.integers(0, max_devices)) for _ in range(num_kinds))
    return CountProblem(values=tuple(values), capacities=capacities)


@settings(max_examples=60, derandomize=True)
@given(problem=problems(max_trials=4, max_width=6, max_devices=8))
def test_dp_and_mip_find_what_brute_force_finds(problem):
    best = brute_force(problem)
    check(problem, solve_exactly(problem), best)
    check(problem, solve_by_mip(problem, 20.0), best)


@settings(max_examples=60, derandomize=True)
@given(problem=problems(max_trials=3, max_width=4, max_devices=5, num_kinds=2))
def test_dp_and_mip_find_what_brute_force_finds_with_two_kinds(problem):
    best = brute_force(problem)
    check(problem, solve_exactly(problem), best)
    check(problem, solve_by_mip(problem, 20.0), best)


@settings(max_examples=300)
@given(problem=problems(max_trials=10, max_width=12, max_devices=50))
def test_fixing_loses_nothing(problem):
    check(problem, solve_exactly(problem), textbook_dp(problem))


def concave(rng, n):
    return np.sort(rng.integers(0, 6, n))[::-1].cumsum()


CURVES = {
    "noise": lambda rng, n: rng.normal(size=n),
    "integers with ties": lambda rng, n: rng.integers(-3, 6, n),
    "subset sums": lambda rng, n: np.where(rng.random(n) < 0.7, -INF, np.arange(1.0, n + 1)),
    "subset sums with a bonus": lambda rng, n: np.where(
        rng.random(n) < 0.7, -INF, np.arange(1.0, n + 1) + 3
    ),
    "orders of magnitude": lambda rng, n: 2.0 ** rng.integers(-30, 30, n),
    "growing slopes": lambda rng, n: 1.5 ** np.arange(1, n + 1),
    "concave": concave,
    "concave with a jump": lambda rng, n: concave(rng, n) + 8 * (np.arange(n) == rng.integers(n)),
    "falling": lambda rng, n: -rng.random(n).cumsum(),
    "one cliff": lambda rng, n: np.where(np.arange(n) < n // 2, -INF, 100.0),
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
def test_fixing_loses_nothing_on_shapes_that_are_hard_for_it(curve):
    rng = np.random.default_rng(0)
    for largest in (40,) * 25 + (300,) * 4:  # the more trials, the smaller the gaps that matter
        num_trials, twins = rng.integers(1, largest), rng.integers(1, 4)
        waiting = float(rng.integers(-3, 4))
        rows = [[waiting, *(waiting + curve(rng, rng.integers(1, 25)))] for _ in range(num_trials)]
        problem = of_one_kind(*rows * twins, capacity=int(rng.integers(0, 12 * num_trials)))
        check(problem, solve_exactly(problem), textbook_dp(problem))


def random_trainers(rng, num_nodes):
    owner = rng.integers(-1, 3, num_nodes)
    trainers = []
    for j in range(3):
        nodes = frozenset(np.flatnonzero(owner == j).tolist())
        points = sorted({0, num_nodes, *rng.integers(1, num_nodes, 2).tolist()})
        rates = [0.0, *np.sort(rng.uniform(1, 100, len(points) - 1)).tolist()]
        trainers.append(
            Trainer(
                table=dict(zip(points, rates, strict=True)),
                smallest=int(rng.integers(1, 3)) if len(nodes) > 1 else 1,
                largest=int(rng.integers(max(2, len(nodes)), num_nodes + 1)),
                up_s=float(rng.uniform(17, 19)),
                down_s=float(rng.uniform(11, 13)),
                nodes=nodes,
            )
        )
    return trainers


@pytest.mark.parametrize("seed", range(12))
def test_counts_suffice_for_the_published_model(seed):
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(4, 8))
    trainers = random_trainers(rng, num_nodes)
    forward_s = float(rng.choice([10.0, 30.0, 120.0]))
    values = tuple(trainer.values(forward_s) for trainer in trainers)
    problem = CountProblem(values=values, capacities=(num_nodes,))
    best, counts = published_optimum(trainers, num_nodes, forward_s, big_m=2 * num_nodes + 2)
    assert worth_of(problem, [(0, n) for n in counts]) == pytest.approx(best, rel=1e-9)
    for found in (solve_exactly(problem), solve_by_mip(problem, 20.0)):
        check(problem, found, best)
        assert worth_of(problem, found.widths) == pytest.approx(brute_force(problem), rel=1e-12)


def test_the_published_big_m_forbids_large_steps():
    # Eq. 10 needs M >= 2 |N_j - C_j|: with M = |N| + 1 = 5 a trial that waits gets two nodes at
    # most, though it is alone and scales perfectly.
    rates = {n: 10.0 * n for n in range(5)}
    trainer = Trainer(rates, smallest=1, largest=4, up_s=0.0, down_s=0.0, nodes=frozenset())
    problem = CountProblem(values=(trainer.values(10.0),), capacities=(4,))
    assert published_optimum([trainer], 4, 10.0, big_m=4 + 1) == (pytest.approx(200.0), (2,))
    assert published_optimum([trainer], 4, 10.0, big_m=2 * 4 + 2) == (pytest.approx(400.0), (4,))
    assert worth_of(problem, solve_exactly(problem).widths) == 400.0


@pytest.mark.parametrize("solve", [solve_exactly, lambda p: solve_by_mip(p, 20.0)])
@pytest.mark.parametrize(
    ("problem", "widths"),
    [
        (CountProblem(values=(), capacities=(3,)), ()),
        (of_one_kind([1, 5], [2, 9], capacity=0), (0, 0)),
        (of_one_kind([1], [2, -INF, -INF], capacity=3), (0, 0)),
        (of_one_kind([0, -1, -2], [5, 4, 3], capacity=3), (0, 0)),
        (of_one_kind([0, 3, 3, 3], capacity=3), (1,)),
        (of_one_kind([0, -INF, 7, 9], [0, 4, 7], capacity=3), (2, 1)),
        (of_one_kind([-5, -9, -1], [-5, -9, -1], capacity=3), None),
    ],
)
def test_odd_problems(solve, problem, widths):
    counts = solve(problem)
    check(problem, counts, brute_force(problem))
    assert widths is None or counts.widths == tuple((0, n) for n in widths)
    assert counts.gap == pytest.approx(0.0, abs=1e-9)


def test_a_trial_runs_on_the_kind_that_leaves_most_to_the_others():
    either = np.array([[0.0, 10.0], [0.0, 9.0]])
    picky = np.array([[0.0, 8.0], [0.0, -INF]])
    problem = CountProblem(values=(either, picky), capacities=(1, 1))
    for counts in (solve_exactly(problem), solve_by_mip(problem, 20.0)):
        assert counts.widths == ((1, 1), (0, 1))


def test_many_equal_trials_on_a_line_are_filled_up():
    row = np.minimum(np.arange(65.0), 48 + np.arange(65.0) / 4)
    problem = of_one_kind(*[row] * 1000, capacity=10_007)
    assert worth_of(problem, solve_exactly(problem).widths) == 10_007.0


@settings(max_examples=50)
@given(problem=problems(max_trials=8, max_width=8, max_devices=30))
def test_equal_problems_have_equal_answers(problem):
    again = CountProblem(
        values=tuple(v.copy() for v in problem.values), capacities=problem.capacities
    )
    assert solve_exactly(again) == solve_exactly(problem)


@pytest.mark.parametrize("ending", ["NO_SOLUTION_FOUND", "ERROR", None])
def test_mip_without_an_incumbent_has_no_answer(monkeypatch, ending):
    def optimize(model, **options):
        if ending is None:
            raise mip.InterfacingError("gone")
        return mip.OptimizationStatus[ending]

    monkeypatch.setattr(mip.Model, "optimize", optimize)
    with pytest.raises(AllocationFailed, match=ending or "InterfacingError: gone"):
        solve_by_mip(of_one_kind([0, 1], capacity=1), 1.0)


def test_mip_stopped_by_time_says_so(monkeypatch):
    optimize = mip.Model.optimize

    def stopped(model, **options):
        optimize(model, **options)
        return mip.OptimizationStatus.FEASIBLE

    monkeypatch.setattr(mip.Model, "optimize", stopped)
    found = solve_by_mip(of_one_kind([0, 1], capacity=1), 1.0)
    assert found == Counts(widths=((0, 1),), status="feasible", gap=0.0)


def test_mip_does_not_look_for_cuts_which_knows_no_time_limit(monkeypatch):
    asked = []
    optimize = mip.Model.optimize
    monkeypatch.setattr(
        mip.Model, "optimize", lambda model, **o: asked.append(model.cuts) or optimize(model, **o)
    )
    solve_by_mip(of_one_kind([0, 1], capacity=1), 1.0)
    assert asked == [0]
