"""Describe the settings of a run, as stored in its config.yaml."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fl_lightning.foundation.metric import MODELS
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import ABSENT, Runs

NONE = "–"
"""Text for an unknown value."""


def component(value: Any) -> str:
    """Describe a method, a model or a list of models: "name (arguments)"."""
    if isinstance(value, list):
        return ", ".join(map(component, value))
    if not isinstance(value, dict):
        return text(value)
    name = text(value.get("name") or value.get("class_path"))
    count = f"{value['count']} x " if value.get("count") else ""
    arguments = value.get("init_args")
    inside = f" ({text(arguments)})" if arguments and isinstance(arguments, dict) else ""
    return f"{count}{name}{inside}"


def method(run: RunResult, runs: Runs) -> str:
    """Describe a run's method; beside other runs, only with arguments that differ between runs of
    this method."""
    name, arguments = _parts(run)
    if len(runs) == 1 or not arguments:
        return component(run.config.get("method"))
    same_method = [others for other_name, others in map(_parts, runs) if other_name == name]
    differing = {
        key: value
        for key, value in arguments.items()
        if any(others.get(key) != value for others in same_method)
    }
    return component(
        {
            "name": name,
            "init_args": differing,
        }
    )


def _parts(run: RunResult) -> tuple[Any, dict[str, Any]]:
    """Split the method into description and arguments."""
    value: Any = run.config.get("method")
    arguments = value.get("init_args") if isinstance(value, dict) else None
    if not isinstance(arguments, dict):
        return value, {}
    return component(value | {"init_args": None}), arguments


def data(run: RunResult) -> str:
    """Describe the data: file or source, partition, and the partition's parameters."""
    root, source, partition = (
        run.setting(f"data.{key}") for key in ("root", "source", "partition")
    )
    file = PurePath(str(root))
    words = [file.name if file.suffix in (".csv", ".npz", ".parquet") else text(source)]
    words.append(text(partition))
    if partition in ("dirichlet", "hsu"):
        words.append(f"alpha {text(run.setting('data.alpha'))}")
    if partition == "pathological":
        words.append(f"{text(run.setting('data.classes_per_client'))} classes a client")
    planted = run.setting("data.planted")
    if planted in ("labels", "permuted", "rotation"):
        words.append(f"{text(run.setting('data.groups'))} planted groups by {planted}")
    return ", ".join(words)


def clients(run: RunResult) -> str:
    """Number of clients, and of those that were held out."""
    held_out = run.facts.get("held_out_clients")
    number = text(run.setting("federation.clients"))
    if isinstance(held_out, list) and held_out:
        return f"{number}, {len(held_out)} of them held out"
    return number


def rounds_done(run: RunResult) -> str:
    """Number of rounds done, of those asked for: "20 of 40"."""
    return f"{run.rounds_done} of {text(run.rounds_asked)}"


def participation(run: RunResult) -> str:
    """Share of the clients in a round's cohort."""
    share = run.setting("federation.participation")
    if isinstance(share, int | float):
        return f"{100 * share:.3g}% of the clients a round"
    return text(share)


def judged_by(run: RunResult) -> str:
    """Describe the kind of model that the judge scores."""
    words = {
        "before": "what the client begins a round with, before local training",
        "after": "the client's model after local training",
        "global": "the global model",
        "finetuned": "a copy of the global model (else of the client's own), fine-tuned by the "
        "client",
    }
    return words.get(run.judge or "", NONE)


def model_words(kind: str | None) -> str:
    """Describe a kind of model, such as "after" or "global"; None: unknown."""
    return MODELS.get(kind or "", "kind of model unknown")


def text(value: Any) -> str:
    """Format the value of a setting; a dash for None and absent values."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items()) or NONE
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    return NONE if value is None or value is ABSENT else str(value)


def local_training(run: RunResult) -> str:
    """Length of local training in a round: steps, or else epochs."""
    steps = run.setting("federation.local_steps")
    return f"{steps} steps" if steps is not None else text(run.setting("federation.local_epochs"))


def optimizer(run: RunResult) -> str:
    """Describe the optimiser: name, learning rate and decay; momentum and the like unless 0."""
    settings = run.setting("optimizer")
    if not isinstance(settings, dict):
        return NONE
    words = [f"{text(settings.get('name'))}, lr {text(settings.get('lr'))}"]
    rate = settings.get("lr_decay", 1)
    if rate != 1:
        words.append(f"times {rate} every {settings.get('lr_step', 1)} rounds")
    further = ("momentum", "weight_decay", "clip_norm")
    words += [f"{key} {text(settings[key])}" for key in further if settings.get(key)]
    return ", ".join(words)


def samples(run: RunResult) -> str:
    """Number of samples for training (with the range over clients) and for tests."""
    rows = run.rows("split")
    if not rows:
        return NONE
    train = [int(row["train_samples"]) for row in rows]
    test = sum(int(row["test_samples"]) for row in rows)
    uneven = f"{min(train)} to {max(train)} a client"
    return f"{sum(train):,} for training ({uneven}), {test:,} for tests"
