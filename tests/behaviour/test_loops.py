"""Objectives that do more than the plain loop: right on any devices, or on one and told."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.behaviour.small import num_wrong, small_model, train_epoch


def prepared(trial: Any, *more: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), *more)


def step(trial: Any, model: Any, optimizer: Any, images: Any, labels: Any) -> float:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(trial.mean(loss.item(), weight=trial.shard_size))


# -- on several devices ---------------------------------------------------------------------------


def evaluates_within_steps(trial: Any) -> float:
    model, optimizer = prepared(trial)
    seen = []
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train_odd", batch_size=10):
            model.eval()
            with torch.no_grad():  # 20 samples by 8: the last shards are unlike those of training
                wrong = sum(num_wrong(model(x), y) for x, y in trial.batches("val", batch_size=8))
            model.train()
            seen += [step(trial, model, optimizer, images, labels), trial.sum(float(wrong))]
    trial.set_user_attr("seen", seen)
    return 0.0


def test_the_same_losses_on_several_devices(lab: Any) -> None:
    lab.same(evaluates_within_steps, [3])


def counts_with_a_loss_module(trial: Any) -> float:
    model, _, _ = prepared(trial, nn.CrossEntropyLoss())
    model.eval()
    with torch.no_grad():
        number = sum(len(labels) for _, labels in trial.batches("val", batch_size=9))
    trial.set_user_attr("seen", trial.sum(number))
    return 0.0


def test_each_sample_is_evaluated_once(lab: Any) -> None:
    assert (
        lab.same(counts_with_a_loss_module, [3]).trial.user_attrs["seen"] == 20
    )  # the last batch is two samples


# -- loops of their own, and evaluations ----------------------------------------------------------


def loops_by_itself(trial: Any) -> float:
    model, optimizer = prepared(trial)
    losses: list[float] = []
    for _ in range(3):
        train_epoch(trial, model, optimizer, losses, batch_size=10)
    trial.set_user_attr("seen", losses)
    return 0.0


def test_a_loop_of_its_own_is_told_that_its_epochs_are_all_alike(lab: Any) -> None:
    lab.same(loops_by_itself, [3], told=["is read again outside of trial.epochs()"])


# -- batches that are not used as they come -------------------------------------------------------


def ahead(batches: Any, number: int) -> Any:
    """As a prefetcher does: the batches, of which that many more are fetched already."""
    queue: deque[Any] = deque()
    for batch in batches:
        queue.append(batch)
        if len(queue) > number:
            yield queue.popleft()
    yield from queue


def changes_outputs_in_place(trial: Any) -> float:
    model, optimizer = prepared(trial)
    head = trial.prepare(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)).double())
    seen = []
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train_odd", batch_size=10):
            outputs = head(model(images))
            outputs /= 2
            loss = F.cross_entropy(outputs.masked_fill_(outputs < -1, -1.0), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(trial.mean(loss.item(), weight=trial.shard_size))
    trial.set_user_attr("seen", seen)
    return 0.0


def weighs_what_it_fetched_ahead(trial: Any, *, normalises: bool = False) -> float:
    model = small_model() if normalises else nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trial.prepare(model, optimizer)
    seen = []
    for _ in trial.epochs(2):
        batches = trial.batches("train_odd", batch_size=10)
        for (images, labels), size in ahead(((b, trial.shard_size) for b in batches), 2):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            trial.weighted(loss, size, fetched_ahead=True).backward()
            optimizer.step()
            seen.append(trial.mean(loss.item(), weight=size))
    trial.set_user_attr("seen", seen)
    return 0.0


LOOPS = {
    "outputs changed in place": changes_outputs_in_place,
    "ahead, with weights": weighs_what_it_fetched_ahead,
}


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_weigh_the_batch_that_was_used(lab: Any, name: str) -> None:
    lab.same(LOOPS[name], [3])


def reads_two_at_once(sizes: tuple[int, int], *, weighs: bool) -> Any:
    def objective(trial: Any) -> float:
        model, optimizer = prepared(trial)
        seen = []
        for _ in trial.epochs(2):
            passes = [trial.batches("train_odd", batch_size=n, drop_last=True) for n in sizes]
            for (images, labels), (more, _) in zip(*passes, strict=False):
                one, other = F.cross_entropy(model(images), labels), model(more).square().mean()
                seen.append(trial.mean(one.item(), weight=len(images)))
                if weighs:
                    one, other = trial.weighted(one, len(images)), trial.weighted(other, len(more))
                optimizer.zero_grad()
                (one + other).backward()
                optimizer.step()
        trial.set_user_attr("seen", seen)
        return 0.0

    return objective


def test_several_batches_in_one_step(lab: Any) -> None:
    lab.same(reads_two_at_once((10, 7), weighs=True), [3])


def skips_steps(trial: Any) -> float:
    model, optimizer = prepared(trial)
    seen = []
    for _ in trial.epochs(2):
        for number, (images, labels) in enumerate(trial.batches("train_odd", batch_size=10)):
            loss = F.cross_entropy(model(images), labels)
            if number % 2:  # the last is the one sample
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(trial.mean(loss.item(), weight=trial.shard_size))
    trial.set_user_attr("seen", seen)
    return 0.0


UNLIKE = {
    "steps are skipped": skips_steps,
    "ahead, with weights and BatchNorm": partial(weighs_what_it_fetched_ahead, normalises=True),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_batches_of_unlike_weight_at_hand_go_on_on_one_device(lab: Any, name: str) -> None:
    lab.one_device(UNLIKE[name], "batches of unlike sizes", widths=[3])


def trains_on_one_within_the_other(trial: Any) -> float:
    model, optimizer = prepared(trial)
    seen = []
    for _ in trial.epochs(1):
        for images, labels in trial.batches("train_odd", batch_size=20):
            seen.append(step(trial, model, optimizer, images, labels))
            for more, theirs in trial.batches("train_odd", batch_size=25):
                seen.append(step(trial, model, optimizer, more, theirs))
    trial.set_user_attr("seen", seen)
    return 0.0


def test_passes_within_passes_and_calls_without_a_backward(lab: Any) -> None:
    lab.same(trains_on_one_within_the_other, [3])


# -- ranks that come apart ------------------------------------------------------------------------


def follows_its_own_loss(trial: Any) -> float:
    model, optimizer = prepared(trial)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in trial.epochs(3):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        plateau.step(0.0 if trial.rank else -float(epoch))  # losses of this rank's samples
    trial.set_user_attr("seen", 0)
    return 0.0


def follows_everybodys_loss(trial: Any) -> float:
    model, optimizer = prepared(trial)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in trial.epochs(3):
        losses: list[float] = []
        train_epoch(trial, model, optimizer, losses, batch_size=10)
        plateau.step(losses[-1])
    trial.set_user_attr("seen", 0)
    return 0.0


def test_ranks_that_come_apart_go_on_on_one_device(lab: Any) -> None:
    words = "ranks have come apart: SGD (1): group 0['lr']"
    lab.one_device(follows_its_own_loss, words, widths=[3])
    lab.same(follows_everybodys_loss, [3])


# -- batch sizes ----------------------------------------------------------------------------------


def leaves_out_the_batch_size(trial: Any) -> float:
    prepared(trial)
    trial.batches("train_odd", batch_size=10)
    trial.set_user_attr("seen", len(trial.batches("val")))
    return 0.0


def test_the_batch_size_is_the_one_given_last(lab: Any) -> None:
    assert lab.same(leaves_out_the_batch_size, [3]).trial.user_attrs["seen"] == 2
