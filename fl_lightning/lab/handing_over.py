"""Exports a client's model to a file, with a Python file that loads it and predicts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import check, flat
from fl_lightning.exporting.calibration import CalibrationRule
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.metric import BY_TASK, FURTHER
from fl_lightning.results import opening

SUFFIXES = {
    "safetensors": ".safetensors",
    "torch_export": ".pt2",
    "onnx": ".onnx",
}
"""Suffix of the exported file by format."""


@dataclass(frozen=True)
class Exported:
    """The exported files; `str` gives lines of Python that use them."""

    model: Path
    loader: Path
    facts: dict[str, Any]
    """The kind of model, its round and the arguments of its class; for a new client also its
    scores."""
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def export(
    run: Path,
    client: str,
    out: str,
    format: str,
    checkpoint: str,
    calibration: CalibrationRule,
    of_site: Callable[[Path, int, Path, CalibrationRule], tuple[Any, dict[str, Any]]],
) -> Exported:
    """Writes one client's model, and beside it a file that loads the model and predicts raw rows.

    Args:
        run: run folder, or the folder of a deployed site.
        client: number or name of the client.
        out: path of the model; the loader has the same stem and the suffix `.py`.
        format: a key of `SUFFIXES`.
        checkpoint: which checkpoint, `last` or `best`.
        calibration: how probabilities and the threshold are fitted to validation data.
        of_site: called if `run` is a deployed site's folder, with the folder, the client's number,
            `out` and `calibration`; writes the model, and returns the config and `Exported.facts`.
    """
    model = Path(out)
    opening.check_path("run", run)
    loader = _new_loader_path(model, out, SUFFIXES[format])
    if (run / opening.SITE).is_file():
        is_plain = format == "safetensors"
        check(
            "format",
            format,
            is_plain,
            "a site's model is exported as safetensors: leave --format out",
        )
        is_number = client.isdecimal()
        check(
            "client",
            client,
            is_number,
            "a site's folder has no names of clients: give the client's number",
        )
        _, facts = of_site(run, int(client), model, calibration)
    else:
        _check_importable(run)
        config = opening.config_of(run)
        from fl_lightning.run import export as write

        facts = write(config, run, client, model, checkpoint, format, calibration)  # type: ignore[arg-type]
    return _with_loader(
        loader,
        run,
        facts.get("whose", f"client {client}"),
        model,
        facts,
        format,
    )


def join(
    run: Path,
    data: str,
    out: str,
    rounds: int | None,
    architecture: str | None,
) -> Exported:
    """Makes a model for a client that was not in the run, as the method serves new clients, and
    writes it with a file that loads it; the run is not changed.

    Args:
        run: run folder.
        data: npz file with `x_train`, `y_train` and, to score the model, `x_test`, `y_test`.
        out: path of the model.
        rounds: rounds of local training on `data`; None: the run's `evaluation.newcomer_rounds`.
        architecture: name or number of the model's architecture if the run has several.
    """
    model = Path(out)
    config = opening.config_of(run)
    loader = _new_loader_path(model, out)
    from fl_lightning.run import join as write

    facts = write(config, run, data, model, rounds, architecture)
    exported = _with_loader(loader, run, "a new client", model, facts)
    scores = []
    for metric in (*BY_TASK.values(), *FURTHER.values()):
        scores += [metric.by("received"), metric.name]
    names = ["labelled", "rule", *scores, "loss"]
    exported.lines.extend(f"# {name}: {facts[name]}" for name in names if name in facts)
    if "loss" in facts:
        exported.lines.append(
            f"# rounds of local training before this score: {facts['trained']} (--rounds); the "
            f"run had {config.federation.rounds}"
        )
    return exported


def _check_importable(run: Path) -> None:
    """Raise `BadInput` if the run's config names a class that was defined in a script
    (`__main__`)."""
    for _, path in flat(opening.saved_settings(run) or {}):
        if str(path).startswith("__main__."):
            name = path.rpartition(".")[2]
            raise BadInput(
                "run",
                str(run),
                f"{name} was defined in a script (__main__), which export cannot import: move the "
                f"class to a file, my_parts.py, and write my_parts.{name} in the run's config.yaml",
            )


def _new_loader_path(
    model: Path,
    out: str,
    suffix: str = ".safetensors",
) -> Path:
    """Returns the path of the loader beside `model`.

    Raises:
        BadInput: `out` has the wrong suffix, a file exists, or the loader would hide a module.
    """
    stem = re.sub(r"^(?=\d)|\W", "_", opening.check_out("out", out, suffix).stem)
    imported = {
        *sys.stdlib_module_names,
        "torch",
        "numpy",
        "safetensors",
        "onnxruntime",
    }
    check(
        "out",
        out,
        stem not in imported,
        f"the {stem}.py beside it would hide the module {stem}; choose another name",
    )
    loader = model.with_name(f"{stem}.py")
    for path in (model, loader):
        check(
            "out",
            out,
            not path.exists(),
            f"{path} exists; choose another path",
        )
    return loader


def _with_loader(
    loader: Path,
    run: Path,
    whose: str,
    model: Path,
    facts: dict[str, Any],
    format: str = "safetensors",
) -> Exported:
    from fl_lightning.exporting.loader import loader_source

    code = loader_source(run, whose, model, facts, format)
    try:
        write_whole(loader, code)
    except RunFailed:  # a full disk: leave both names free for another try
        model.unlink(missing_ok=True)
        raise
    head = [line for line in code.splitlines()[:2] if line.startswith("#")]
    lines = [
        *head,
        f"from {loader.stem} import predict  # {loader}: predict(rows) gives the class, of a "
        "regression the number, of each raw row",
    ]
    about = facts.get("about", {})
    if about.get("class_names"):
        lines.append(f"from {loader.stem} import predict_proba  # probabilities by class")
    if "temperature" in about:
        lines.append(f"# temperature, fitted to validation data: {about['temperature']:.4g}")
    if "threshold" in about:
        case, least = about["threshold"]
        lines.append(f"# {case} from a probability of {least:.4g} on, chosen on validation data")
    return Exported(model, loader, facts, lines)
