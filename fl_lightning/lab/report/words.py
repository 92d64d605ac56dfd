"""Settings of a run in words, as config.yaml gives them."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fl_lightning.foundation.metric import MODELS
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import ABSENT

NONE = "–"
"""The text where a value is not known."""


def component(value: Any) -> str:
    """A method or model as config.yaml gives it: its name and what it is built with."""
    if isinstance(value, list):
        return ", ".join(component(item) for item in value)
    if not isinstance(value, dict):
        return text(value)
    name = text(value.get("name") or value.get("class_path"))
    count = f"{value['count']} x " if value.get("count") else ""
    given = value.get("init_args")
    inside = (
        ", ".join(f"{key} {text(item)}" for key, item in given.items())
        if isinstance(given, dict)
        else ""
    )
    return f"{count}{name} ({inside})" if inside else f"{count}{name}"


def method(run: RunResult, runs: list[RunResult]) -> Any:
    """A run's method; beside other runs, with those arguments alone in which runs of the same
    method differ."""

    def parts(of: RunResult) -> tuple[Any, dict[str, Any]]:
        value = of.config.get("method")
        if not isinstance(value, dict) or not isinstance(value.get("init_args"), dict):
            return value, {}
        return component({**value, "init_args": None}), value["init_args"]

    name, given = parts(run)
    same = [others for other, others in map(parts, runs) if other == name]
    if len(runs) == 1 or not given:
        return run.config.get("method")
    return {
        "name": name,
        "init_args": {k: v for k, v in given.items() if any(args.get(k) != v for args in same)},
    }


def data(run: RunResult) -> str:
    """Source, partition and what it is like."""
    root = PurePath(str(run.setting("data.root")))
    source = (
        root.name
        if root.suffix in (".csv", ".npz", ".parquet")
        else text(run.setting("data.source"))
    )
    words = [source, text(run.setting("data.partition"))]
    if run.setting("data.partition") in ("dirichlet", "hsu"):
        words.append(f"alpha {text(run.setting('data.alpha'))}")
    if run.setting("data.partition") == "pathological":
        words.append(f"{text(run.setting('data.classes_per_client'))} classes a client")
    if run.setting("data.planted") in ("labels", "permuted", "rotation"):
        words.append(
            f"{text(run.setting('data.groups'))} planted groups by "
            f"{text(run.setting('data.planted'))}"
        )
    return ", ".join(words)


def clients(run: RunResult) -> str:
    """How many there are, and how many of them were held out."""
    held_out = run.facts.get("held_out_clients")
    number = text(run.setting("federation.clients"))
    return (
        f"{number}, {len(held_out)} of them held out"
        if isinstance(held_out, list) and held_out
        else number
    )


def participation(run: RunResult) -> str:
    """Share of the clients in a cohort."""
    share = run.setting("federation.participation")
    return (
        f"{100 * share:.3g}% of the clients a round"
        if isinstance(share, int | float)
        else text(share)
    )


def judged_by(run: RunResult) -> str:
    """Which kind of model the judge scores."""
    words = {
        "before": "what the client begins a round with, before local training",
        "after": "the client's model after local training",
        "global": "the global model",
        "finetuned": "a copy of the global model (else of the client's own), fine-tuned by the "
        "client",
    }
    return words.get(run.judge or "", NONE)


def model_words(kind: str | None) -> str:
    """A kind of model."""
    return MODELS.get(kind or "", "kind of model unknown")


def text(value: Any) -> str:
    """Any value of a setting."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items()) or NONE
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    return NONE if value is None or value is ABSENT else str(value)


def local_training(run: RunResult) -> str:
    """Its length in a round."""
    steps = run.setting("federation.local_steps")
    return f"{steps} steps" if steps is not None else text(run.setting("federation.local_epochs"))


def optimizer(run: RunResult) -> str:
    """Its name, learning rate and whatever else is not 0."""
    settings = run.setting("optimizer")
    if not isinstance(settings, dict):
        return NONE
    more = [
        f"{key} {text(settings[key])}"
        for key in ("momentum", "weight_decay", "clip_norm")
        if settings.get(key)
    ]
    rate = settings.get("lr_decay", 1)
    decay = [f"times {rate} every {settings.get('lr_step', 1)} rounds"] if rate != 1 else []
    return ", ".join(
        [f"{text(settings.get('name'))}, lr {text(settings.get('lr'))}", *decay, *more]
    )


def samples(run: RunResult) -> str:
    """How many there are, and how unevenly they are dealt."""
    if not run.rows("split"):
        return NONE
    train, test = (
        [int(row[f"{part}_samples"]) for row in run.rows("split")] for part in ("train", "test")
    )
    return (
        f"{sum(train):,} for training ({min(train)} to {max(train)} a client), {sum(test):,} for "
        f"tests"
    )
