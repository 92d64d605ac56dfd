"""From what a method says of a phase to what an executor trains."""

from __future__ import annotations

from dataclasses import replace

from fl_lightning.callbacks.stepprivacy import protection
from fl_lightning.core import Client, ModelGroup, Phase, RunContext
from fl_lightning.data.part import TargetPart
from fl_lightning.storage.state import MODEL
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.schedule import BatchSchedule, Length


def schedule_of(
    run: RunContext,
    group: ModelGroup,
    client: int,
    index: int,
    purpose: str,
    length: Length,
    batch_size: int | None = None,
    public: bool = False,
) -> BatchSchedule:
    """The batches of the phase of `client` after `index` of the same purpose and length, on its own
    data or on `public` ones, which a rehearsed round does not cut short (`batch_size` None: the
    federation's)."""
    most = run.most_batches if not public or run.config.smoke else None
    length = length if most is None else length.at_most(most)
    size = batch_size or run.config.federation.batch_size
    return BatchSchedule(
        run.config.seed, purpose, client, index, length, size, group.whole_last, most
    )


def on_own_data(client: Client, phase: Phase) -> bool:
    """Whether `phase` trains on the client's training data, or on a subset of them."""
    return phase.part is None or phase.part.whole is client.data.train


def job_of(
    client: Client, phase: Phase, index: int | None = None, purpose: str | None = None
) -> LocalJob:
    """`phase` of `client`, after `index` of its purpose (None: one for each round before), for an
    executor (`purpose`: in place of the phase's)."""
    run, group = client.run, client.group
    index = client.round - 1 if index is None else index
    part = client.data.train if phase.part is None else phase.part
    if phase.targets is not None:
        part = TargetPart(part, phase.targets)
    length = Length.of(run.config.federation)
    if phase.steps is not None:
        length = Length(steps=phase.steps)
    elif phase.epochs is not None:
        length = Length(epochs=phase.epochs)
    public = not on_own_data(client, phase)
    schedule = schedule_of(
        run, group, client.id, index, purpose or phase.purpose, length, phase.batch_size, public
    )
    if phase.budget is not None:
        schedule = replace(schedule, budget=phase.budget, before=client.rounds)
    keep = run.config.optimizer.keep_state
    own = phase.step
    job = LocalJob(
        vector=client[phase.slot],
        buffers=client.state.buffers,
        part=part,
        schedule=schedule,
        lr=client.lr if phase.lr is None else phase.lr,
        objective=phase.objective,
        trains=phase.trains,
        step=None if own is None else lambda batch, _: own(client, batch),
        asker=client if phase.by_gradient else None,
        private=protection(client, phase),
    )
    # a stretch on public data begins cleared, and leaves nothing
    if keep and own is None and not public:
        job.keep, prefix = True, _prefix(phase)
        job.kept = {
            k.removeprefix(prefix): v for k, v in client.memory.items() if _belongs(k, prefix)
        }
    return job


def keep_optimizer(client: Client, phase: Phase, job: LocalJob) -> None:
    """Keep, with the client, what its optimiser was left with."""
    if not job.keep:
        return
    prefix, store = _prefix(phase), client.run.store
    others = {k: v for k, v in client.memory.items() if not _belongs(k, prefix)}
    kept = {f"{prefix}{k}": store.stow(v) if v.ndim else v for k, v in job.kept.items()}
    client.state.memory = others | kept


def _prefix(phase: Phase) -> str:
    """Of the names under which a client's memory has what the optimiser of such phases was left
    with.

    Phases of another slot or purpose (FedAS's alignment) are another descent: they share nothing.
    """
    of_slot = "optimizer." if phase.slot == MODEL else f"optimizer.slot {phase.slot}."
    return of_slot if phase.purpose == "train" else f"{of_slot}phase {phase.purpose}."


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.removeprefix(prefix).startswith(("slot ", "phase "))
