"""How many runs of a study train together in a process, and how their clients train
(docs/performance.md)."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration.config import Config, ModelConfig
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import one_line
from fl_lightning.lab.study.grid import Pairs, by_key

if TYPE_CHECKING:
    from fl_lightning.lab.study.folder import StudyFolder
    from fl_lightning.lab.study.workers import More

RECORD = "executors.json"
"""In the study's folder: how the clients of each kind of run train, so that a continued study stays
as it is."""
EVERY_KIND = ""
"""In the record, in place of the kinds: how all runs train."""
FULL = 256
"""Clients that train at once, where `auto` says how many runs do: two passes of the widest.
Ours."""
SHARE = 0.5
"""Of the memory that is free, what a study's processes may take by what one run was measured to
take. Ours: a pass over all runs at once takes more than one run's."""
WORTH_MEASURING = 2_000
"""Visits of clients in a study from which `auto` measures. Ours: fewer take half a minute in the
loop."""


def most_at_once(number: int | str, configs: Sequence[Config]) -> int:
    """How many runs of `configs` train together in one process; 1: no two, as where nothing is
    stacked."""
    if not any(config.fabric.executor == "vmap" for config in configs):
        return 1
    for config in configs:
        one_process = config.fabric.devices in (1, "auto") and config.fabric.num_nodes == 1
        # W&B: a logger of which a process has one
        if not one_process or any("wandb" in name for name in config.loggers):
            return 1
    if number != "auto":
        return int(number)
    cohorts = [round(c.federation.participation * c.federation.clients) for c in configs]
    return max(1, FULL // max(1, min(cohorts)))


def within_memory(
    most: int,
    workers: int,
    configs: Sequence[Config],
) -> int:
    """`most` runs at a time in each of so many processes, or as many as there is memory for; a line
    says so.

    Memory is measured in a process of its own: this one must run no threads when it forks the
    workers.
    """
    if most == 1:
        return most
    import torch

    from fl_lightning.foundation import device
    from fl_lightning.lab.study.workers import in_a_process

    room = SHARE * device.free_bytes(torch.device("cpu")) / workers
    one_of_each = {kind_of(config): config for config in configs}
    try:
        measured = [in_a_process(_measured_bytes, config) for config in one_of_each.values()]
    except (BadInput, RunFailed) as error:
        begin = f"together: the memory of {most} runs is not known ({one_line(error)})"
        log.say(f"{begin}; if it does not suffice, give fewer")
        return most
    first, further = max(measured, key=lambda sizes: sizes[0] + most * sizes[1])
    size = first + (most - 1) * further
    if size <= room:
        return most
    fits = 1 + int(max(0.0, room - first) / further) if further else 1
    need = f"{most} runs take some {log.in_bytes(size)}"
    log.say(f"together: {fits} at a time: {need}, and a process may take {log.in_bytes(room)}")
    return fits


def _measured_bytes(config: Config) -> tuple[float, float]:
    from fl_lightning.lab.planning.rehearsal import memory_of_runs

    return memory_of_runs(_with_executor(config, "vmap"))


def _with_executor(config: Config, executor: Any) -> Config:
    return replace(config, fabric=replace(config.fabric, executor=executor))


def with_executors(
    folder: StudyFolder, chosen: Pairs, number: int | str, pairs: Pairs
) -> tuple[Pairs, dict[str, str]]:
    """The `chosen` of the study's `pairs`, each with the executor that runs of its kind have in
    this study, and the executors by kind, which are to be `keep`t in the study's folder.

    With `auto` it is measured once for each kind, in the order of the pairs; a number takes `vmap`
    for all; with 1, and where the base names an executor, it is the base's. Runs that are there
    already keep what they began with.
    """
    executors = _record(folder.path)
    if executors is None:
        # it was begun with runs that train one by one
        executors = {EVERY_KIND: "loop"} if folder.begun() else {}
    free = [config for _, config in chosen if config.fabric.executor == "loop"]
    if not free or (number == 1 and not executors):
        return chosen, {}
    visits = 0
    for _, config in pairs:
        federation = config.federation
        visits += round(federation.rounds * federation.participation * federation.clients)
    for config in free:
        kind = kind_of(config)
        if EVERY_KIND in executors or kind in executors:
            continue
        if number == "auto":
            executors[kind] = _measured(config) if visits >= WORTH_MEASURING else "loop"
        else:
            executors[kind] = "loop" if number == 1 else "vmap"
    with_them = []
    for run, config in chosen:
        if config.fabric.executor == "loop":
            executor = executors.get(EVERY_KIND) or executors[kind_of(config)]
            config = _with_executor(config, executor)
        with_them.append((run, config))
    return with_them, executors


def by_method(pairs: Pairs) -> Pairs:
    """The seeds of a method and setting one after the other: at the same time they share the passes
    of an own loss."""
    seeds = by_key(pairs, lambda pair: pair[0].folder.rpartition("/")[0])
    return list(itertools.chain(*seeds.values()))


def keep(folder: StudyFolder, executors: dict[str, str]) -> None:
    """Write down how clients train in this study."""
    if executors and executors != _record(folder.path):
        write_whole(folder.path / RECORD, json.dumps(executors, indent=1) + "\n")


def kind_of(config: Config) -> str:
    """The model, data, batches and optimiser, which decide how fast clients train."""
    models = [f"{_name(model)} {model.component.init_args}" for model in config.models]
    batches = f"{config.data.source} in batches of {config.federation.batch_size}"
    return ", ".join([*models, batches, config.optimizer.name])


def _name(model: ModelConfig) -> str:
    return model.component.class_path.rpartition(".")[2].lower()


def _record(path: Path) -> dict[str, str] | None:
    """What was chosen for this study; None: nothing yet."""
    try:
        executors = json.loads((path / RECORD).read_text(encoding="utf-8"))
        if not isinstance(executors, dict) or not set(executors.values()) <= {
            "loop",
            "vmap",
        }:
            raise ValueError("it holds something else")
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise BadInput(
            "out",
            str(path),
            "a part of it is a file, and no folder",
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(
            "out", str(path), f"its {RECORD} cannot be read ({error}): delete it"
        ) from None
    return executors


def _measured(config: Config) -> str:
    """`vmap`, where clients of several runs train faster beside each other, else `loop`: in a
    process of its own."""
    from fl_lightning.lab.study.workers import in_a_process

    executor, line = in_a_process(_gain, config)
    log.say(f"together auto: {executor} for {line}")
    return str(executor)


def _gain(config: Config) -> tuple[str, str]:
    """The executor, and how it was found."""
    from fl_lightning.run import launch

    single = replace(
        config,
        fabric=replace(
            config.fabric,
            devices=1,
            num_nodes=1,
        ),
    )
    try:
        answers = launch(single, _faster, FULL)["answers"]
    except Exception as error:
        answers = [f"it cannot be measured ({one_line(error)})"]
    # one that cannot be stacked says why, in words
    pairs = [("loop", answer) if isinstance(answer, str) else answer for answer in answers]
    executor, reason = next((pair for pair in pairs if pair[0] == "loop"), pairs[0])
    return executor, f"{', '.join(map(_name, config.models))}: {reason}"


def _faster(
    fabric: Any,
    config: Config,
    jobs: int,
) -> dict[str, Any]:
    """`faster_together` of each model, where so many clients of several runs train at once."""
    from fl_lightning.engine.trainer import faster_together
    from fl_lightning.run import assemble
    from fl_lightning.training.executors.together import Together

    with tempfile.TemporaryDirectory() as folder:
        fed = assemble(
            fabric,
            config,
            Path(folder),
            [],
            together=Together(),
        )
        return {"answers": [faster_together(trainer, jobs) for trainer in fed.worker.trainers]}


def drive(
    run: Callable[[Any, Any], str | None],
    more: More,
) -> Iterator[tuple[int, str | None]]:
    """What a worker does whose runs train together.

    `run`: trains a job (config and folder), put together by a function (`fit`'s `put_together`);
    returns None, or one line that says why it failed.
    """
    import torch

    from fl_lightning.run import assemble
    from fl_lightning.training.executors.together import Together

    together = Together()
    put_together = partial(assemble, together=together)

    def works(waits: bool) -> Any:
        numbered = more(waits)
        if numbered is None:
            return None
        number, job = numbered
        config, _ = job
        # each run would put back what it found, in the middle of the others
        if config.fabric.threads is not None:
            torch.set_num_threads(config.fabric.threads)
        return number, lambda: run(job, put_together)

    yield from together.drive(works)
