"""Memory of a study's process in which several runs train together on a CPU, part by part."""

from __future__ import annotations

import math

from fl_lightning.planning.memory import MIB, Part, Setup, evaluation, lasting, mixing, of_sample, peak, visit
from fl_lightning.training.executors.even import MOST_AT_ONCE, widened
from fl_lightning.training.executors.vmap import AHEAD

WORKER_MIB = 610
"""A study's process without any run: it is forked, and what its parent alone has touched is not its own. Measured: 560
with the digits, 680 with torchvision's data."""
RUN_MIB = 0.5
"""What a run of the smallest model has beside the tensors that are counted: modules, tables, records (measured)."""


def together(setup: Setup, runs: int) -> list[Part]:
    """Of the process, with so many runs of the kind of `setup`; clients train as its executor has them."""
    own = sum(part.bytes for part in lasting(setup) if part.name != "program") + RUN_MIB * MIB
    stacked = setup.width > 1
    how = "one after the other: those in the loop do not wait for each other"
    if stacked:
        how = f"{runs:,} of them, each with its data, clients and server"
    parts = [
        Part("program", WORKER_MIB * MIB, "a study's process"),
        Part("runs", (runs if stacked else 1) * own, how),
        Part(
            "reading", 2 * setup.sizes.raw / setup.config.data.fraction, "the data, before a fraction is drawn", False
        ),
    ]
    steps = _passes(setup, runs, own) if stacked else [visit(setup)]
    return [*parts, *steps, evaluation(setup), mixing(setup)]


def most_that_fit(setup: Setup, most: int, room: float) -> int:
    """Of `most` runs so many as take at most `room` bytes together; at least 1."""
    return next((runs for runs in range(most, 1, -1) if peak(together(setup, runs)) <= room), 1)


def _passes(setup: Setup, runs: int, each: float) -> list[Part]:
    """The stack that all runs share, and what a pass, or the test of it when the first run begins, takes on top.

    `each`: bytes of a run.
    """
    config, widest, most = setup.config.optimizer, setup.widest, max(setup.sizes.train)
    size = min(setup.config.federation.batch_size, most)
    momentum, decays, terms = config.momentum > 0, config.weight_decay > 0, widest.terms > 0
    width, active = MOST_AT_ONCE, widened(runs * setup.here)
    stack = width * (widest.vector + widest.own + (1 + momentum) * widest.trained)
    added = (width * (widest.terms - 1) + active) * widest.trained * terms
    step = max(2 * widest.saved + widest.trained, (1 + decays + terms) * widest.trained)
    batch = of_sample(setup) * size
    steps = active * (step + batch * (1 + min(AHEAD, math.ceil(most / size))))
    clients: float = runs * setup.here * widest.vector  # what each client's model has become, beside what it was
    if widest.asks:  # instead, of each a permuted copy of an epoch, and vectors of its step (measured: 2 to 5)
        clients = runs * setup.here * (5 * widest.vector + of_sample(setup) * most)
    test = width * (2 * widest.vector + 2 * widest.trained + 2 * widest.saved + 4 * batch)
    first = max(0.0, test - added - (runs - 1) * each)
    return [
        Part("stack", stack + added, f"{width} models side by side, with gradients and terms"),
        Part("a pass", steps + clients, f"{active} models a step, {AHEAD} batches of each laid out", False),
        Part("test of the pass", first, "as the first run begins: do numbers depend on the slot?", False),
    ]
