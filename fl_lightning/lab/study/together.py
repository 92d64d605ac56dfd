"""How many runs of a study train together in a process, and how their clients train
(docs/performance.md)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fl_lightning.configuration.config import Config
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, RunFailed, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.grid import by_key

if TYPE_CHECKING:
    from fl_lightning.engine.federation import Federation
    from fl_lightning.lab.study.folder import StudyFolder
    from fl_lightning.lab.study.grid import Run
    from fl_lightning.lab.study.workers import More
    from fl_lightning.training.executors.base import Name
    from fl_lightning.training.executors.together import Together

RECORD = "executors.json"
"""In the study's folder: how the clients of each kind of run train, so that a continued study stays
as it is."""
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
        single = config.fabric.devices in (1, "auto") and config.fabric.num_nodes == 1
        if not single or any("wandb" in name for name in config.loggers):
            return 1  # processes of its own, or a logger of which a process has one
    if number != "auto":
        return int(number)
    fewest = min(max(1, round(c.federation.participation * c.federation.clients)) for c in configs)
    return max(1, FULL // fewest)


def within_memory(most: int, workers: int, configs: Sequence[Config]) -> int:
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
        reason = redact(" ".join(str(error).split()))
        log.say(
            f"together: the memory of {most} runs is not known ({reason}); if it does not "
            f"suffice, give fewer"
        )
        return most
    one, further = max(measured, key=lambda pair: pair[0] + most * pair[1])
    whole = one + (most - 1) * further
    if whole <= room:
        return most
    fits = 1 + int(max(0.0, room - one) / further) if further else 1
    takes = (
        f"{most} runs take some {log.in_bytes(whole)}, and a process may take {log.in_bytes(room)}"
    )
    log.say(f"together: {fits} at a time: {takes}")
    return fits


def _measured_bytes(config: Config) -> tuple[float, float]:
    from fl_lightning.lab.planning.rehearsal import run_bytes

    stacked = replace(config, fabric=replace(config.fabric, executor="vmap"))
    return run_bytes(stacked)


def with_executors(
    folder: StudyFolder,
    pairs: Sequence[tuple[Any, Config]],
    number: int | str,
    whole: Sequence[Config],
) -> tuple[list[tuple[Any, Config]], dict[str, str]]:
    """`pairs` of runs and configs, each with the executor that runs of its kind have in this study.

    With `auto` it is measured once for each kind, in the order of the pairs; a number takes `vmap`
    for all; with 1, and where the base names an executor, it is the base's. Runs that are there
    already keep what they began with.

    Args:
        whole: the configs of all runs of the study.

    Returns:
        These, and what is to be `keep`t in the study's folder.
    """
    free = [config for _, config in pairs if config.fabric.executor == "loop"]
    known = _record(folder.path)
    if known is None and folder.begun():
        known = {"": "loop"}  # it was begun with runs that train one by one
    if (number == 1 and not known) or not free:
        return list(pairs), {}
    known = known or {}
    visits = sum(
        round(c.federation.rounds * c.federation.participation * c.federation.clients)
        for c in whole
    )
    for config in free:
        kind = kind_of(config)
        if "" in known or kind in known:
            continue
        if number == "auto":
            known[kind] = _measured(config) if visits >= WORTH_MEASURING else "loop"
        else:
            known[kind] = "loop" if number == 1 else "vmap"

    def chosen(config: Config) -> Config:
        name = known.get("", known.get(kind_of(config), "loop"))
        if config.fabric.executor != "loop" or name == "loop":
            return config
        return replace(config, fabric=replace(config.fabric, executor=cast("Name", name)))

    return [(run, chosen(config)) for run, config in pairs], known


def by_method(pairs: Sequence[tuple[Run, Config]]) -> list[tuple[Run, Config]]:
    """The seeds of a method and setting one after the other: at the same time they share the passes
    of an own loss."""
    seeds = by_key(pairs, lambda pair: pair[0].folder.rpartition("/")[0])
    return [pair for those in seeds.values() for pair in those]


def keep(folder: StudyFolder, known: dict[str, str]) -> None:
    """Write down how clients train in this study."""
    if known and known != _record(folder.path):
        write_whole(folder.path / RECORD, json.dumps(known, indent=1) + "\n")


def kind_of(config: Config) -> str:
    """What decides how fast clients train: model, data, batches and optimiser."""
    models = [
        f"{m.component.class_path.rpartition('.')[2].lower()} {m.component.init_args}"
        for m in config.models
    ]
    batches = f"{config.data.source} in batches of {config.federation.batch_size}"
    return ", ".join([*models, batches, config.optimizer.name])


def _record(path: Path) -> dict[str, str] | None:
    """What was chosen for this study; None: nothing yet."""
    file = path / RECORD
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(known, dict) or not set(known.values()) <= {"loop", "vmap"}:
            raise ValueError("it holds something else")
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise BadInput("out", str(path), "a part of it is a file, and no folder") from None
    except (OSError, ValueError) as error:
        raise BadInput(
            "out", str(path), f"its {RECORD} cannot be read ({error}): delete it"
        ) from None
    return known


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

    name = ", ".join(
        model.component.class_path.rpartition(".")[2].lower() for model in config.models
    )
    single = replace(config, fabric=replace(config.fabric, devices=1, num_nodes=1))
    try:
        answer = launch(single, _faster, FULL)["answer"]
    except Exception as error:
        answer = f"it cannot be measured ({' '.join(str(error).split())})"
    return (
        ("loop", f"{name}: {answer}")
        if isinstance(answer, str)
        else (answer[0], f"{name} ({answer[1]})")
    )


def _faster(fabric: Any, config: Config, jobs: int) -> dict[str, Any]:
    """Which executor is faster where so many clients of several runs train at once, and how that
    was found; or why they cannot."""
    from fl_lightning.engine.trainer import faster_together
    from fl_lightning.run import assemble
    from fl_lightning.training.executors.together import Together

    with tempfile.TemporaryDirectory() as folder:
        fed = assemble(fabric, config, Path(folder), [], together=Together())
        answers = [faster_together(trainer, jobs) for trainer in fed.worker.trainers]
    slower = next(
        (answer for answer in answers if isinstance(answer, str) or answer[0] == "loop"), answers[0]
    )
    return {"answer": slower}


def driven(together: Together) -> Callable[..., Federation]:
    """What puts a run together that `together` drives beside others: `fit`'s `put_together`."""
    from fl_lightning.run import assemble

    return partial(assemble, together=together)


def drive(
    run: Callable[[Config, Path, Callable[..., Federation]], str | None], more: More
) -> Iterator[tuple[int, str | None]]:
    """What a worker does whose runs train together.

    `run`: runs a config in a folder, put together by a function; None, or one line that says why it
    failed.
    """
    import torch

    from fl_lightning.training.executors.together import Together

    together = Together()
    put_together = driven(together)

    def works(waits: bool) -> Any:
        job = more(waits)
        if job is None:
            return None
        number, (config, folder) = job
        # each run would put back what it found, in the middle of the others
        if config.fabric.threads is not None:
            torch.set_num_threads(config.fabric.threads)
        return number, lambda: run(config, folder, put_together)

    yield from together.drive(works)
