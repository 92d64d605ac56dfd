"""`fl-train dashboard`: the project's workspace at W&B, the same as a file, or a study as a W&B sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli import studyfile
from fl_lightning.cli.folder import check_out
from fl_lightning.cli.resolve import to_yaml
from fl_lightning.cli.settings import read_line
from fl_lightning.cli.study import resolve
from fl_lightning.config import check
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.files import write_whole
from fl_lightning.metric import ACCURACY, BY_TASK, Metric
from fl_lightning.results.columns import shown
from fl_lightning.study.grid import Study, is_linked

MARK = "# Written by fl-train dashboard --sweep\n"
"""Begins both files of a sweep: what begins otherwise is not written over."""
VIEW_MARK = '"type": "project-view"'
"""Near the beginning of each view that is kept as a file."""


def dashboard(argv: list[str]) -> None:
    """Save the workspace at W&B where it has changed, or write it (`--json`) or a sweep (`--sweep`) to a file."""
    values = read_line(argv, "dashboard").values
    if values.sweep is not None:
        check("json", values.json, values.json is None, "with sweep no view is written")
        _write_sweep(Path(values.sweep), values.project, values.entity)
        return
    from fl_lightning.report import workspace

    if values.json is not None:
        file = check_out("json", values.json, "", VIEW_MARK, "view of W&B")
        view = workspace.view(values.entity or "", values.project, values.name)
        write_whole(file, json.dumps(view, indent=1) + "\n", durable=False)
        print(f"dashboard: {values.json}")
        return
    try:
        where, saved = workspace.save(values.entity, values.project, values.name)
    except BadInput:
        raise
    except Exception as error:  # its text stays unsaid: it may hold parts of the key
        raise RunFailed(f"W&B: the view could not be saved ({type(error).__name__}); see --json FILE") from None
    print(f"dashboard: {where} ({'saved' if saved else 'unchanged'})")


def sweep(study: Study, base: str, project: str, entity: str | None, metric: Metric = ACCURACY) -> dict[str, Any]:
    """A W&B sweep over the methods, settings and seeds of a study, without its forced rows.

    Args:
        study: whose grid it is.
        base: the config file that all runs begin with.
        project: of W&B.
        entity: of W&B; None: the user's own.
        metric: by which the runs are judged.

    Raises:
        BadInput: a method has settings of its own or arguments in some settings only (`when`), or keys of the grid vary
            together: a sweep is a product of lists.
    """
    entries = [entry for entry in study.entries() if not entry.forced]
    product = "a sweep is a product of lists"
    for entry in entries:
        check(entry.key, ", ".join(entry.settings), not entry.settings, f"{product}: arguments alone")
        check(f"{entry.key}.when", ", ".join(entry.when), not entry.when, f"{product}: the same arguments everywhere")
    for key, values in study.grid.items():
        check(f"grid.{key}", values, not is_linked(key), f"{product}: each key varies by itself")
    methods = [_flow({"name": e.name, "init_args": e.arguments}) if e.arguments else e.name for e in entries]
    grid = {  # W&B takes numbers and texts
        key: {"values": [value if isinstance(value, int | float | str) else _flow(value) for value in values]}
        for key, values in study.grid.items()
    }
    made: dict[str, Any] = {"name": Path(base).stem, "project": project} | ({"entity": entity} if entity else {})
    return made | {
        "method": "grid",
        "metric": {"name": shown(metric.of("mean")), "goal": "maximize" if metric.rises else "minimize"},
        "command": ["${env}", "fl-train", "fit", "--config", base, "${args}", "--loggers", "wandb"],
        "parameters": {"method": {"values": methods}, "seed": {"values": study.seeds}, **grid},
    }


def _write_sweep(file: Path, project: str, entity: str | None) -> None:
    """Write the sweep of a study file beside it, and the config that its runs begin with."""
    study = Study.of(studyfile.read(str(file)))
    settled, _, _ = resolve(study)  # refuses what `fl-train study` would refuse
    base, out = file.with_suffix(".base.yaml"), file.with_suffix(".sweep.yaml")
    made = sweep(study, str(base), project, entity, BY_TASK[settled.data.task])
    bases = {Path(part).resolve() for part in study.base if isinstance(part, str)}
    allowed = "the config of the sweep's runs is written there: the study's own must have another name"
    check("base", str(base), base.resolve() not in bases, allowed)
    check_out("sweep", str(base), "", MARK, "config of a sweep")
    check_out("sweep", str(out), "", MARK, "sweep")
    write_whole(base, MARK + to_yaml(settled), durable=False)
    write_whole(out, MARK + yaml.safe_dump(made, sort_keys=False), durable=False)
    print(f"sweep: {out}; start it with: wandb sweep {out}")


def _flow(value: Any) -> str:
    """`value` as YAML on one line, as a flag takes it."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()
