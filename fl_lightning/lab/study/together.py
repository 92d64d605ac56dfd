"""Decides how many runs of a study train together in one process, and with which executor their
clients train: `loop`, one client after the other, or `vmap`, several in stacked passes
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

EXECUTORS_FILE = "executors.json"
"""File in the study's folder with the executor of each kind of run, so that a continued study uses
the same."""
EVERY_KIND = ""
"""Key in that file for an executor of all runs."""
CLIENTS_AT_ONCE = 256
"""Clients that train at once, over all runs of a process, with `auto`: two of the widest stacked
passes (our choice)."""
MEMORY_SHARE = 0.5
"""Share of the free memory that a study may take, by the measured memory of one run (our choice): a
pass over several runs takes more."""
WORTH_MEASURING = 2_000
"""Visits of clients in a study from which `auto` measures (our choice): fewer take half a minute
with `loop`."""


def most_at_once(number: int | str, configs: Sequence[Config]) -> int:
    """The most runs that train together in a process, before memory is considered.

    1 if no run uses `vmap`, if a run needs several processes, or if it logs to W&B, of which a
    process can have one run.

    Args:
        number: the user's number, or `auto`.
        configs: the runs.
    """
    if not any(config.fabric.executor == "vmap" for config in configs):
        return 1
    for config in configs:
        one_process = config.fabric.devices in (1, "auto") and config.fabric.num_nodes == 1
        # a process can have one W&B run
        if not one_process or any("wandb" in name for name in config.loggers):
            return 1
    if number != "auto":
        return int(number)
    cohorts = [round(c.federation.participation * c.federation.clients) for c in configs]
    return max(1, CLIENTS_AT_ONCE // max(1, min(cohorts)))


def within_memory(
    most: int,
    workers: int,
    configs: Sequence[Config],
) -> int:
    """Lower `most`, the number of runs that train together in each of `workers` processes, to what
    memory allows; prints a line if it does.

    Memory is measured in a process of its own, since this process must have no threads when it
    forks the workers.
    """
    if most == 1:
        return most
    import torch

    from fl_lightning.foundation import device
    from fl_lightning.lab.study.workers import in_a_process

    room = MEMORY_SHARE * device.free_bytes(torch.device("cpu")) / workers
    one_of_each = {kind_of(config): config for config in configs}
    try:
        measured = [in_a_process(_measured_bytes, config) for config in one_of_each.values()]
    except (BadInput, RunFailed) as error:
        log.say(
            f"together: the memory of {most} runs is not known ({one_line(error)}); if it does "
            "not suffice, give fewer"
        )
        return most
    first_bytes, further_bytes = max(measured, key=lambda sizes: sizes[0] + most * sizes[1])
    size = first_bytes + (most - 1) * further_bytes
    if size <= room:
        return most
    fits = 1 + int(max(0.0, room - first_bytes) / further_bytes) if further_bytes else 1
    log.say(
        f"together: {fits} at a time: {most} runs take some {log.in_bytes(size)}, and a process "
        f"may take {log.in_bytes(room)}"
    )
    return fits


def _measured_bytes(config: Config) -> tuple[float, float]:
    """The memory of a process with one run, and of each further run."""
    from fl_lightning.lab.planning.rehearsal import memory_of_runs

    return memory_of_runs(_with_executor(config, "vmap"))


def _with_executor(config: Config, executor: Any) -> Config:
    return replace(config, fabric=replace(config.fabric, executor=executor))


def choose_executors(
    folder: StudyFolder, chosen: Pairs, number: int | str, pairs: Pairs
) -> tuple[Pairs, dict[str, str]]:
    """Choose the executor (`loop` or `vmap`) of each run.

    A run keeps `vmap` if its config names it. A run of a kind (`kind_of`) for which the study has
    recorded an executor gets that one. Other runs get `loop` if `number` is 1, `vmap` if it is
    greater, and with `auto` the executor that a measurement finds faster, or `loop` if the study is
    too small to measure (`WORTH_MEASURING`).

    Args:
        folder: the study's folder.
        chosen: the runs to train.
        number: most runs that train together in one process, or `auto`.
        pairs: all runs of the study, which give its size.

    Returns:
        The runs of `chosen`, with the executor in their configs; the executor of each kind, for
        `write_executors`.
    """
    executors = _read_executors(folder.path)
    if executors is None:
        # the study began with runs that train one by one
        executors = {EVERY_KIND: "loop"} if folder.has_begun() else {}
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
            executors[kind] = _faster_executor(config) if visits >= WORTH_MEASURING else "loop"
        else:
            executors[kind] = "loop" if number == 1 else "vmap"
    chosen_with_executors = []
    for run, config in chosen:
        if config.fabric.executor == "loop":
            executor = executors.get(EVERY_KIND) or executors[kind_of(config)]
            config = _with_executor(config, executor)
        chosen_with_executors.append((run, config))
    return chosen_with_executors, executors


def order_by_method(pairs: Pairs) -> Pairs:
    """Reorder runs so that the seeds of a method and setting are neighbours.

    Neighbours train together; if the method has a loss of its own, only clients with the same loss
    can share a stacked pass.
    """
    seeds = by_key(pairs, lambda pair: pair[0].folder.rpartition("/")[0])
    return list(itertools.chain(*seeds.values()))


def write_executors(folder: StudyFolder, executors: dict[str, str]) -> None:
    """Write the executor of each kind of run to the study's folder."""
    if executors and executors != _read_executors(folder.path):
        write_whole(folder.path / EXECUTORS_FILE, json.dumps(executors, indent=1) + "\n")


def kind_of(config: Config) -> str:
    """The kind of a run: the model, data, batch size and optimiser, on which the speed of local
    training depends."""
    models = [f"{_name(model)} {model.component.init_args}" for model in config.models]
    batches = f"{config.data.source} in batches of {config.federation.batch_size}"
    return ", ".join([*models, batches, config.optimizer.name])


def _name(model: ModelConfig) -> str:
    return model.component.class_path.rpartition(".")[2].lower()


def _read_executors(path: Path) -> dict[str, str] | None:
    """The executor of each kind of run; None if the study has not chosen any."""
    try:
        executors = json.loads((path / EXECUTORS_FILE).read_text(encoding="utf-8"))
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
            "a folder of this path is a file: choose another path",
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(
            "out", str(path), f"its {EXECUTORS_FILE} cannot be read ({error}): delete it"
        ) from None
    return executors


def _faster_executor(config: Config) -> str:
    """Measure which executor is faster for clients of several runs, in a process of its own; prints
    the reason."""
    from fl_lightning.lab.study.workers import in_a_process

    executor, line = in_a_process(_executor_and_reason, config)
    log.say(f"together auto: {executor} for {line}")
    return str(executor)


def _executor_and_reason(config: Config) -> tuple[str, str]:
    """The faster executor, and the measurement or the reason why it is `loop`."""
    from fl_lightning.run import launch

    single_process = replace(
        config,
        fabric=replace(
            config.fabric,
            devices=1,
            num_nodes=1,
        ),
    )
    try:
        answers = launch(single_process, _answers_of_trainers, CLIENTS_AT_ONCE)["answers"]
    except Exception as error:
        answers = [f"it cannot be measured ({one_line(error)})"]
    # an architecture that cannot be stacked gives the reason as text
    pairs = [("loop", answer) if isinstance(answer, str) else answer for answer in answers]
    executor, reason = next((pair for pair in pairs if pair[0] == "loop"), pairs[0])
    return executor, f"{', '.join(map(_name, config.models))}: {reason}"


def _answers_of_trainers(
    fabric: Any,
    config: Config,
    jobs: int,
) -> dict[str, Any]:
    """The result of `faster_together` for each architecture, with `jobs` clients at once."""
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


def serve_together(
    run: Callable[[Any, Any], str | None],
    more: More,
) -> Iterator[tuple[int, str | None]]:
    """Train several jobs of one worker at a time, whose clients take local steps in common stacked
    passes.

    Args:
        run: trains one job; returns None, or a line that says why the run failed. Its arguments are
            the job (config and run folder) and the function that builds the job's federation, for
            `put_together` of `run.fit`.
        more: returns the next job (`workers.More`); called whenever another job can begin.

    Yields:
        The job's number and the result of `run`, as each job ends.
    """
    import torch

    from fl_lightning.run import assemble
    from fl_lightning.training.executors.together import Together

    together = Together()
    put_together = partial(assemble, together=together)

    def next_work(waits: bool) -> Any:
        numbered = more(waits)
        if numbered is None:
            return None
        number, job = numbered
        config, _ = job
        # set here, since a run that restores it would do so in the middle of the others
        if config.fabric.threads is not None:
            torch.set_num_threads(config.fabric.threads)
        return number, lambda: run(job, put_together)

    yield from together.drive(next_work)
