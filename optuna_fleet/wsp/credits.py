"""How many minibatches a stage holds at most: what it must have memory for."""

from __future__ import annotations


def held_minibatches(stage: int, num_stages: int, in_flight: int) -> int:
    """Most minibatches that are between their forward and backward pass on a stage.

    A minibatch comes back after at most two turns of each later stage, so more would not keep the
    pipeline fuller. Stages admit no more forward passes than this; first come, first served, as in
    the paper (section 4), would pile up to ``in_flight`` on every stage but the last.

    Args:
        stage: Place in the pipeline, from 0.
        num_stages: Stages of the pipeline, k.
        in_flight: Minibatches in the whole pipeline, N_m.
    """
    return min(in_flight, 2 * (num_stages - 1 - stage) + 1)
