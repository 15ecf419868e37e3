"""`trial.pipeline`: stages train as one device does, or as stale as they say."""

from __future__ import annotations

import functools
import json
import operator
import platform
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.harness import moment
from tests.behaviour.parts import EPOCHS, convnet

EXACTLY: dict[str, Any] = {"rel": 0.0, "absolute": 0.0}
TOLD = ["It is not checked whether it gives the same on several devices, as it has asked for them"]

# -- with flushes ---------------------------------------------------------------------------------


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def noisy() -> nn.Sequential:
    return convnet().insert(3, nn.Dropout(0.2))


def in_stages(trial: Any, *, build: Any = convnet) -> None:
    model = build()
    optimizer = momentum(model)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy)
    seen = trial.state.setdefault("seen", [])
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            moment(trial)
            seen.append(pipeline.step(images, labels).item())
        seen.append(pipeline.evaluate(trial.batches("val", batch_size=8)))


def plainly(trial: Any) -> None:
    """The same loop without `trial.pipeline`: gradients of a batch's four parts add up."""
    model = convnet()
    optimizer = momentum(model)
    model, optimizer = trial.prepare(model, optimizer)
    seen = trial.state.setdefault("seen", [])
    for _ in trial.epochs(EPOCHS):
        model.train()
        for images, labels in trial.batches("train", batch_size=10):
            losses, size = [], len(images)
            for part in range(4):
                its = slice(part * size // 4, (part + 1) * size // 4)
                if size < 4:  # as many stand-ins of no weight
                    its = slice(min(part, size - 1), min(part, size - 1) + 1)
                weight = (its.stop - its.start) / size if size >= 4 else float(part < size) / size
                losses.append(F.cross_entropy(model(images[its]), labels[its]) * weight)
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            # From Python 3.12 on `sum` is more exact than adding one after the other.
            seen.append(functools.reduce(operator.add, (loss.item() for loss in losses)))
        model.eval()
        with torch.no_grad():
            batches = [*trial.batches("val", batch_size=8)]
            sums = [F.cross_entropy(model(x), y).item() * len(x) for x, y in batches]
        seen.append(functools.reduce(operator.add, sums) / sum(len(x) for x, _ in batches))


def test_stages_give_the_bits_of_one_device_also_where_they_move(lab: Any) -> None:
    lab.same(functools.partial(in_stages, build=noisy), [2, 1, 3], told=TOLD, **EXACTLY)


def test_stages_give_the_bits_of_a_plain_loop_over_the_parts(lab: Any) -> None:
    assert lab.fly(in_stages, [3]).values == lab.undisturbed(plainly).values


def deep() -> nn.Sequential:
    """With dropout, and two layers that have one weight."""
    tied = [nn.Linear(3, 3) for _ in range(2)]
    tied[1].weight = tied[0].weight
    return noisy().extend([nn.Tanh(), tied[0], nn.Tanh(), tied[1]]).double()


def shared(trial: Any, *, layout: list[int] | None = None, **more: Any) -> None:
    """With a clipped norm, a layer that is frozen in the second epoch, and this layout on four."""
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, max_grad_norm=0.5, **more)
    seen = trial.state.setdefault("seen", [])
    for epoch in trial.epochs(EPOCHS):
        model[0].requires_grad_(epoch != 1)
        for images, labels in trial.batches("train", batch_size=10):
            moment(trial)
            seen.append(pipeline.step(images, labels).item())
        seen.append(pipeline.evaluate(trial.batches("val", batch_size=8)))
        assert trial.world_size < 4 or layout in (
            None,
            [pipeline.num_virtual_workers, pipeline.num_stages],
        )


@pytest.mark.parametrize(("workers", "layout"), [(2, [2, 2]), (3, [3, 2]), (9, [4, 1])])
def test_pipelines_that_share_each_batch_give_the_bits_of_one(
    lab: Any, workers: int, layout: list[int]
) -> None:
    objective = functools.partial(shared, layout=layout, virtual_workers=workers)
    lab.same(objective, [4, 2, 3], told=TOLD, **EXACTLY)


def test_who_has_a_share_of_each_batch_and_dies_costs_its_trial_nothing_but_time(lab: Any) -> None:
    """Once the first, amid the first epoch, and once the last, amid the second one."""
    objective = functools.partial(shared, virtual_workers=2)
    lab.same(objective, [4], kills={2: 0, 8: 3}, told=TOLD, **EXACTLY)


# -- without: how stale weights are ---------------------------------------------------------------

UNIT = 1024.0
"""In the samples of the second virtual worker, where those of the first one have 1."""


class Counting(nn.Module):
    """Its weight counts on how many batches of each virtual worker it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.given: set[float] = set()

    def forward(self, given: Any) -> tuple[Tensor, ...]:
        x, *before = given if isinstance(given, tuple) else (given,)
        self.given |= set(x.tolist())
        if x[0] == UNIT:
            time.sleep(0.005)  # so that they come apart
        return x, *before, x * self.weight


class Noting:
    """A loss whose gradient is the same at any weights; knows the weights of each minibatch."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def __call__(self, outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
        x, *products = outputs
        if len(set(x.tolist())) == 1:  # a virtual worker's part, not the whole batch
            at = {(product / x)[0].item() for product in products}
            assert len(at) == 1, "stages have had weights of different versions"
            self.weights += at
        return -torch.stack(products).sum(0).mean()


NUM_STEPS = 20
ALONE = {"virtual_workers": 1, "clock_distance": 0}


def counts(
    trial: Any, *, folder: Path | None = None, num_workers: int = 1, nodes: int = 1, **options: Any
) -> None:
    """Rank by rank leaves behind which parts it was given, and if it has the loss, the weights."""
    model, noting = nn.Sequential(*(Counting() for _ in range(4))), Noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(num_workers))
    pipeline = trial.pipeline(model, optimizer, noting, **options)
    values = [1.0, UNIT][:num_workers]
    x = torch.tensor(values, dtype=torch.float64).repeat_interleave(4 // num_workers)
    node = f"node{trial.rank * nodes // trial.world_size}"
    with mock.patch.object(platform, "node", return_value=node):
        losses = [pipeline.step(x, x) for _ in range(NUM_STEPS)]
    layers = [layer for layer in model if not layer.weight.is_meta]
    given = sorted(set.union(*(layer.given for layer in layers)))
    rest = [loss.item() for loss in pipeline.flush()]
    mean = pipeline.evaluate([(x, x)], lambda outputs, _: (outputs[-1] / outputs[0]).mean())
    trial.state["seen"] = {
        "losses": [None if loss is None else loss.item() for loss in losses] + rest,
        "layout": [pipeline.num_virtual_workers, pipeline.num_stages],
        "in_flight": pipeline.in_flight,
        "trained": mean,
    }
    if folder is not None:
        left = {"given": given, "weights": noting.weights}
        (folder / str(trial.rank)).write_text(json.dumps(left))


@pytest.mark.parametrize("width", [1, 3])
def test_without_flushes_a_batch_lacks_as_many_updates_as_are_in_flight(
    lab: Any, width: int
) -> None:
    flown = lab.fly(functools.partial(counts, in_flight=3, **ALONE), [width])
    seen = flown.values["seen"]
    expected = [-4.0 * max(0, number - 3) for number in range(1, NUM_STEPS + 1)]
    assert seen["layout"] == [1, width]
    assert seen["losses"] == [None] * NUM_STEPS + expected
    assert seen["trained"] == NUM_STEPS


@pytest.mark.parametrize("distance", [0, 2])
def test_with_a_clock_distance_weights_are_as_stale_as_published_at_most(
    lab: Any, tmp_path: Path, distance: int
) -> None:
    """HetPipe, section 5: of m in flight m - 1 may miss of one's own, (D + 2) m - 2 of others'."""
    m = 3
    options = {"in_flight": m, "clock_distance": distance, "virtual_workers": 2}
    flown = lab.fly(functools.partial(counts, folder=tmp_path, num_workers=2, **options), [4])
    assert flown.values["seen"]["layout"] == [2, 2]
    assert flown.values["seen"]["losses"][:NUM_STEPS] == [None] * NUM_STEPS
    assert len(flown.values["seen"]["losses"]) == 2 * NUM_STEPS
    assert flown.values["seen"]["trained"] == NUM_STEPS * (1 + UNIT)
    left = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    with_loss = [one for one in left if one["weights"]]
    assert sorted(one["given"] for one in with_loss) == [[1.0], [UNIT]]
    for one in with_loss:
        weights = one["weights"][:NUM_STEPS]  # then it is evaluated
        of_second, of_first = zip(*(divmod(weight, UNIT) for weight in weights), strict=True)
        owns, others = (of_first, of_second)[:: 1 if one["given"] == [1.0] else -1]
        for number, (own, other) in enumerate(zip(owns, others, strict=True), 1):
            assert max(0, number - m) <= own < number
            assert number - 1 - other <= (distance + 2) * m - 2
            assert other <= ((number - 1) // m + distance + 1) * m


# -- which devices, and how many in flight --------------------------------------------------------


def test_on_two_nodes_a_layout_says_who_is_with_whom(lab: Any, tmp_path: Path) -> None:
    """With a clock distance of 0 the losses are those of any other."""
    losses = []
    for layout in ("NP", "ED", "HD", "ED-local"):
        options = {"clock_distance": 0, "layout": layout, "num_workers": 2, "nodes": 2}
        objective = functools.partial(counts, folder=tmp_path, **options)
        seen = lab.fly(objective, [4]).values["seen"]
        assert seen["layout"] == [2, 2]
        assert seen["in_flight"] == 3  # as many as keep two stages busy
        given = [json.loads((tmp_path / str(rank)).read_text())["given"] for rank in range(4)]
        together = [[rank for rank in range(4) if given[rank] == its] for its in ([1.0], [UNIT])]
        on_nodes = [[rank // 2 for rank in ranks] for ranks in together]
        assert on_nodes == ([[0, 0], [1, 1]] if layout == "NP" else [[0, 1], [0, 1]])
        losses.append(seen["losses"])
    assert losses == losses[:1] * 4


def test_four_are_in_flight_unless_it_is_said(lab: Any) -> None:
    assert lab.fly(counts, [3]).values["seen"]["in_flight"] == 4


def adam(trial: Any) -> None:
    model = convnet()
    trial.pipeline(model, torch.optim.Adam(model.parameters()), F.cross_entropy, clock_distance=1)


def test_updates_that_do_not_add_up_are_refused(lab: Any) -> None:
    lab.refused(adam, "The optimizer is Adam", "only right for torch.optim.SGD")
