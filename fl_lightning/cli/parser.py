"""The keys of each command: types, defaults, help (jsonargparse), and the check that turns an error into one line."""

from __future__ import annotations

import re
import types
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, get_args

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from fl_lightning import catalogue
from fl_lightning.config import DataConfig, EvaluationConfig, FabricConfig, FederationConfig, OptimizerConfig, check
from fl_lightning.configuration.describe import words
from fl_lightning.errors import BadInput

GROUPS: dict[str, type] = {
    "federation": FederationConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "evaluation": EvaluationConfig,
    "fabric": FabricConfig,
}

COMPONENTS = {
    "method": "Method by name or import path (default: selfkapc); its arguments: --method.ARG VALUE.",
    "model": "Model by name or import path; its arguments: --model.ARG VALUE. In YAML also a list of {name, count}.",
    "callbacks": "Callbacks by name, with commas; arguments: --callbacks.NAME.ARG VALUE; --callbacks.NAME null: none.",
    "loggers": "Loggers by name, with commas; arguments and null as for callbacks.",
}

Form = Literal["table", "csv", "latex", "json", "html"]
"""Of a table of methods."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@cache
def fit_parser() -> ArgumentParser:
    """All keys of a run."""
    parser = _parser("fit", "Train a federation. Later config files and flags win; names: fl-train list.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file, or the name of a shipped config (repeatable).")
    add("--print_config", type=bool, default=False, help="Print the resolved config, which can be fed back, and stop.")
    add("--smoke", type=bool, default=False, help="One round, few clients, two batches; made-up data where none are.")
    add("--seed", type=int, default=0, help="All randomness is a function of it.")
    add("--out", type=str, default="runs", help="Parent of run folders.")
    add("--name", type=str | None, default=None, help="Run folder (default: method, data, seed, counter).")
    add("--resume", type=bool, default=False, help="Continue the run --name; on a first start with --config, start it.")
    _add_accept(add)
    for key, text in COMPONENTS.items():
        add(f"--{key}", metavar="NAME", help=text)
    _add_groups(parser, *GROUPS)
    return parser


def test_parser() -> ArgumentParser:
    """`--run`, and what may differ when a finished run is judged again."""
    parser = _parser("test", "Judge the models of a finished run again.")
    _add_run(parser)
    _add_data_place(parser)
    _add_groups(parser, "evaluation", "fabric")
    return parser


def export_parser() -> ArgumentParser:
    """`--run`, `--client`, `--out`."""
    parser = _parser("export", "Write a client's personalised model as safetensors, with a snippet that loads it.")
    _add_run(parser)
    parser.add_argument("--client", type=int, required=True, metavar="I", help="The client's number, from 0.")
    parser.add_argument("--out", type=str, required=True, metavar="FILE.safetensors", help="The file to write.")
    return parser


def report_parser() -> ArgumentParser:
    """`--out`, `--figures`, `--accept_changed_code`; the runs are words without a key."""
    description = "Write one HTML page on runs (or on folders of them) side by side, or on a study."
    parser = _parser("report", description, "RUN [RUN ...] | STUDY")
    text = "The page (default: report.html, in the run folder if there is one RUN, else here)."
    parser.add_argument("--out", type=str | None, default=None, metavar="FILE.html", help=text)
    text = "Write the charts, too, each to a file beside the page, in the folder FILE-figures."
    parser.add_argument("--figures", type=Literal["svg", "pdf", "png"] | None, default=None, help=text)
    text = "Of a study: as for fl-train compare, which makes its page."
    parser.add_argument("--accept_changed_code", type=bool, default=False, help=text)
    return parser


def dashboard_parser() -> ArgumentParser:
    """`--entity`, `--project`, `--name`, `--json`, `--sweep`."""
    parser = _parser("dashboard", "Save the project's workspace at W&B, or write it, or a study as a sweep, to a file.")
    add = parser.add_argument
    add("--entity", type=str | None, default=None, metavar="E", help="Of W&B (default: the user's own).")
    add("--project", type=str, default="fl_lightning", metavar="P", help="Of W&B.")
    add("--name", type=str, default="fl_lightning", help="Of the view; one that is there is brought to the same.")
    add("--json", type=str | None, default=None, metavar="FILE", help="Write the view there, and send nothing.")
    add("--sweep", type=str | None, default=None, metavar="STUDY.yaml", help="Write a W&B sweep of a study beside it.")
    return parser


def compare_parser() -> ArgumentParser:
    """`--baseline`, `--judge`, `--metric`, `--target`, `--format`, `--out`, `--picture`; studies or runs are words
    without a key."""
    parser = _parser("compare", "Compare methods over seeds, paired, in one table.", "STUDY | RUN [RUN ...]")
    add = parser.add_argument
    add("--baseline", type=str | None, default=None, metavar="NAME", help="Method that differences are to (default: "
        "training alone, else the first of its judge).")  # fmt: skip
    judges = Literal["before", "distilled", "after", "global", "finetuned"]
    add("--judge", type=judges | None, default=None, help="Kind of model that all are scored by (default: each run's).")
    metrics = Literal["accuracy", "balanced_accuracy", "f1", "auroc"]
    add("--metric", type=metrics, default="accuracy", help="Scores: accuracy, or what evaluation.metrics named.")
    add("--target", type=float | None, default=None, help="Accuracy, 0 to 1, at which bytes and seconds are taken.")
    add("--format", type=Form, default="table", help="Of what is written.")
    add("--out", type=str | None, default=None, metavar="FILE", help="Write there, not to the screen.")
    text = "Compare although seeds of a row were trained with different versions of own code; it is said below."
    add("--accept_changed_code", type=bool, default=False, help=text)
    text = "The critical-difference picture, where there are settings enough for it."
    add("--picture", type=str | None, default=None, metavar="FILE.png", help=text)
    return parser


def join_parser() -> ArgumentParser:
    """`--run`, `--data`, `--out`, `--rounds`, `--architecture`."""
    parser = _parser("join", "Give a new client a personalised model from a finished run, which stays as it is.")
    parser.add_argument("--run", type=str, required=True, metavar="DIR", help="The run folder.")
    parser.add_argument(
        "--data", type=str, required=True, metavar="FILE.npz", help="x_train, y_train (without it: unlabelled), and, "
        "to be judged, x_test, y_test.",
    )  # fmt: skip
    parser.add_argument("--out", type=str, required=True, metavar="FILE.safetensors", help="The file to write.")
    text = "How many times local_epochs a labelled client trains; null: the run's evaluation.newcomer_rounds."
    parser.add_argument("--rounds", type=int | None, default=None, help=text)
    text = "Its architecture, where clients run several: its name, or where that is not one's alone its place from 0."
    parser.add_argument("--architecture", type=str | None, default=None, metavar="NAME", help=text)
    return parser


def relative_parser() -> ArgumentParser:
    """`--run`."""
    parser = _parser("relative", "Compare a finished run, client by client, with training alone.")
    parser.add_argument("--run", type=str, required=True, metavar="DIR", help="The run folder.")
    return parser


def submit_parser() -> ArgumentParser:
    """What a SLURM job needs; all other keys are `fit`'s."""
    parser = _parser(
        "submit", "Hand a fit to SLURM: a job that goes on where it stood when it is stopped, or an array."
    )
    _add_job(parser)
    text = "A sweep, one run folder each: 'seed=0-4 data.alpha=0.1,0.3'."
    parser.add_argument("--array", type=str | None, default=None, metavar="'KEY=VALUES ...'", help=text)
    return parser


def study_parser() -> ArgumentParser:
    """`--out`, `--workers`, `--methods`, `--seeds`, `--settings`, and what SLURM jobs need."""
    description = "Run a grid of methods, settings and seeds, or what is missing of it."
    parser = _parser("study", f"{description} Keys with a dot (data.root, ...) are set over its base.", "STUDY")
    add = parser.add_argument
    add("--out", type=str, required=True, metavar="DIR", help="The study's folder, new or with a part of it.")
    text = "Processes, each with one run at a time (default: one for each core; with GPUs one)."
    add("--workers", type=int | None, default=None, metavar="N", help=text)
    _add_part(parser)
    _add_accept(add)
    add("--slurm", type=bool, default=False, help="Hand the runs to SLURM as an array of jobs, with the keys below.")
    _add_job(parser, needed=False)
    return parser


def reproduce_parser() -> ArgumentParser:
    """`--out`, `--workers`, `--methods`, `--seeds`, `--settings`, `--rounds`, `--format`, `--no_run`."""
    text = "Run a study of a paper's table, or what is missing of it, and print the paper's numbers beside ours."
    parser = _parser("reproduce", text, "STUDY")
    add = parser.add_argument
    text = "The study's folder, new or with a part of it (default: studies/NAME)."
    add("--out", type=str | None, default=None, metavar="DIR", help=text)
    add("--workers", type=int | None, default=None, metavar="N", help="Processes, as for fl-train study.")
    _add_part(parser)
    _add_accept(add)
    add("--rounds", type=int | None, default=None, help="Other rounds; it is said in the heading.")
    add("--format", type=Form, default="table", help="Of the table.")
    add("--no_run", type=bool, default=False, help="Run nothing: the table of what is there.")
    return parser


def _add_accept(add: Callable[..., Any]) -> None:
    text = "Go on although own code has changed since it was begun; both are kept, with the rounds of each."
    add("--accept_changed_code", type=bool, default=False, help=text)


def _add_part(parser: ArgumentParser) -> None:
    """Which of a study's runs are run now."""
    add = parser.add_argument
    text = "Run some of its methods now, by their labels, with commas (the forced rows come with them)."
    add("--methods", type=str | None, default=None, metavar="LABEL,...", help=text)
    text = "Run these seeds now, of the study's or others beside them: 0, or 0,2, or 0-4."
    add("--seeds", type=str | None, default=None, metavar="SEEDS", help=text)
    text = "Run some of its settings now: data.alpha=0.3, with commas."
    add("--settings", type=str | None, default=None, metavar="KEY=VALUE,...", help=text)


def archive_parser() -> ArgumentParser:
    """`--out`, `--rerun`, and where data lie; the study or archive is a word without a key."""
    parser = _parser("archive", "Pack a study into one file, or run a cell of such a file again.", "STUDY | FILE.zip")
    add = parser.add_argument
    text = "The file (default: STUDY.zip); with --rerun a new folder that the run is kept in."
    add("--out", type=str | None, default=None, metavar="FILE.zip", help=text)
    text = "Run this cell of the archive again, such as runs/kapc/seed-0, and hold it against what it came to."
    add("--rerun", type=str | None, default=None, metavar="CELL", help=text)
    _add_data_place(parser)
    return parser


def tune_parser() -> ArgumentParser:
    """`--out`, `--trials`, `--workers`, `--seed`, `--untuned`, `--study`."""
    description = "Search for methods' arguments on validation data, then run a study of the choices on fresh seeds."
    parser = _parser("tune", description, "STUDY")
    add = parser.add_argument
    add("--out", type=str, required=True, metavar="DIR", help="The search's folder, new or with a part of it.")
    text = "Trials of each method (20: as many again as the random ones that optuna's TPE begins with)."
    add("--trials", type=int, default=20, metavar="N", help=text)
    text = "Processes, each with one run at a time (default: one for each core; with GPUs one)."
    add("--workers", type=int | None, default=None, metavar="N", help=text)
    text = "Of the trials' runs and of what they try; none of the study's seeds (1000: hardly anybody's)."
    add("--seed", type=int, default=1000, help=text)
    _add_accept(add)
    add("--untuned", type=bool, default=False, help="Judge the settings that the search began from, too: rows beside.")
    add("--study", type=bool, default=True, help="Run the study of the choices; false: write its file, tuned.yaml.")
    return parser


def check_method_parser() -> ArgumentParser:
    """`--only`, `--out`; the method is a word without a key, and all other keys are `fit`'s."""
    description = "Try a method of your own: seeds, resume, skip, partial cohorts, hard data, bytes, two processes."
    parser = _parser("check-method", f"{description} Other keys are those of fit.", "METHOD")
    add = parser.add_argument
    add("--only", type=str | None, default=None, metavar="CHECK,...", help="Some checks, by name (default: all).")
    text = "A new folder in which the runs stay (default: they are thrown away)."
    add("--out", type=str | None, default=None, metavar="DIR", help=text)
    return parser


def plan_parser() -> ArgumentParser:
    """What a run is to have; all other keys are `fit`'s."""
    text = "Estimate memory and bytes between ranks of a fit there, and rehearse a round here for its seconds."
    parser = _parser("plan", text)
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="Machines (1: as fabric.num_nodes).")
    add("--gpus_per_node", type=int, default=0, help="GPUs on each, one process each.")
    add("--devices", type=int, default=0, help="Processes on each node without GPUs (0: as fabric.devices).")
    text = "GiB of a GPU (null: this machine's, or 80)."
    add("--gpu_memory", type=float | None, default=None, help=text)
    add("--node_memory", type=float | None, default=None, help="GiB of a node without GPUs (null: this machine's).")
    add("--samples", type=int, default=500, help="Training samples of a client, where the data are not here.")
    add("--no_run", type=bool, default=False, help="Rehearse no round: memory and bytes alone, seconds unknown.")
    add("--json", type=bool, default=False, help="Bytes, operations and seconds, for scripts.")
    return parser


def keys(parser: ArgumentParser) -> dict[str, Action]:
    """Every key that takes a value, with its parser action."""
    names = [action.dest for action in parser._actions]
    groups = {name for name in GROUPS if any(other.startswith(f"{name}.") for other in names)}
    return {action.dest: action for action in parser._actions if action.dest not in groups | {"help"}}


def hint(action: Action) -> Any:
    """The type that an action takes."""
    return getattr(action, "_typehint", action.type)


def typed(parser: ArgumentParser, values: dict[str, Any], prefix: str = "") -> Namespace:
    """`values` (nested) checked and converted, with every default; `BadInput` names the key, after `prefix`."""
    known = keys(parser)
    given = dict(leaves(values, known, prefix))
    for key, action in known.items():
        check(prefix + key, None, not action.required or key in given, "it must be given")
    for key, value in given.items():
        if value is None and not _takes_none(hint(known[key])):
            raise BadInput(prefix + key, value, f"it must be {words(hint(known[key]))}")
    try:
        return parser.parse_object(values)
    except ArgumentError as error:
        key = _key_in(str(error))
        if key not in known:
            raise BadInput(prefix.rstrip("."), values, str(error)) from None
        raise BadInput(prefix + key, given.get(key), f"it must be {words(hint(known[key]))}") from None


def leaves(
    values: dict[str, Any], known: dict[str, Action], prefix: str = "", path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested dict; `BadInput` for a key that does not exist."""
    for name, value in values.items():
        key = f"{path}{name}"
        inside = [other for other in known if other.startswith(f"{key}.")]
        if key in known:
            yield key, value
        elif inside and isinstance(value, dict):
            yield from leaves(value, known, prefix, f"{key}.")
        elif inside:
            raise BadInput(prefix + key, value, f"it is a group of keys: {', '.join(inside)}")
        else:
            raise unknown(prefix + key, value, [prefix + other for other in known])


def unknown(key: str, value: Any, known: list[str]) -> BadInput:
    """The error for a key that does not exist; few keys are listed, many are left to `--help`."""
    keys = (", ".join(known) or "none") if len(known) <= 20 else "see fl-train fit --help"
    return BadInput(key, value, f"no such key{catalogue.did_you_mean(key, known)}; keys: {keys}")


def _takes_none(kind: Any) -> bool:
    return kind in (None, Any, types.NoneType) or types.NoneType in get_args(kind)


def _key_in(message: str) -> str:
    found = re.search(r'key "([^"]+)"', message)
    return found.group(1) if found else ""


def _parser(command: str, description: str, words: str = "") -> ArgumentParser:
    name = f"fl-train {command}"
    usage = " ".join(filter(None, [name, words, "[--key value ...]"]))
    return ArgumentParser(name, usage=usage, description=description, exit_on_error=False, allow_abbrev=False)


def _add_job(parser: ArgumentParser, needed: bool = True) -> None:
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="Machines; sets fabric.num_nodes.")
    add("--gpus_per_node", type=int, default=0, help="GPUs, one process each; sets fabric.devices.")
    add("--tasks_per_node", type=int, default=1, help="Processes on each node without GPUs.")
    time: dict[str, Any] = {"type": str, "required": True} if needed else {"type": str | None, "default": None}
    add("--time", metavar="HH:MM:SS", help="The job's time limit.", **time)
    add("--partition", type=str | None, default=None, help="SLURM's partition.")
    add("--warning", type=int, default=120, help="Seconds before the limit at which the run stops itself.")
    add("--sbatch", type=str | None, default=None, help="Further words for sbatch: '--qos=low --exclusive'.")
    add("--dry_run", type=bool, default=False, help="Show the script, submit nothing.")


def _add_run(parser: ArgumentParser) -> None:
    parser.add_argument("--run", type=str, required=True, metavar="DIR", help="The run folder.")
    which = "The newest checkpoint, or the best one that was kept (of the round with the best mean accuracy)."
    parser.add_argument("--checkpoint", type=Literal["last", "best"], default="last", help=which)


def _add_data_place(parser: ArgumentParser) -> None:
    fixed = DataConfig.__dataclass_fields__.keys() - {"root", "download", "resident"}
    parser.add_class_arguments(DataConfig, "data", skip=set(fixed))


def _add_groups(parser: ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_class_arguments(GROUPS[name], name)
    for action in parser._actions:
        if action.dest in GROUPS:
            action.help = SUPPRESS  # jsonargparse's own way of reading a group from a file
