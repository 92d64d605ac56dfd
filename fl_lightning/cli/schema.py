"""The keys of each command but `list` and `status`: type with bounds, default and help of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fl_lightning.configuration.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
)

REQUIRED: Any = object()
"""The default of a key that must be given."""
Keys = dict[str, tuple[Any, Any, str]]
"""Type, default and help of each key; `DIR: text` says what stands for the value."""


@dataclass(frozen=True)
class Command:
    """What a command does and accepts."""

    does: str
    keys: Keys = field(default_factory=dict)
    words: str = ""
    """What it takes beside keys."""


Form = Literal["table", "csv", "latex", "json", "html"]
Judge = Literal["before", "distilled", "after", "global", "finetuned"]
RUN: Keys = {"run": (str, REQUIRED, "DIR: the run folder.")}
CHECKPOINT: Keys = {
    "checkpoint": (
        Literal["last", "best"],
        "last",
        "The newest, or the best by validation (else mean) accuracy.",
    ),
}
SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
"""How a file ends that is exported in each format."""
WORKERS: Keys = {
    "workers": (
        PositiveInt | None,
        None,
        "Worker processes (default: one per core, or 1 with a GPU).",
    ),
}
CHANGED: Keys = {
    "accept_changed_code": (
        bool,
        False,
        "Continue although your own code has changed; the run keeps both versions.",
    ),
}
TOGETHER: Keys = {
    "together": (
        int | str | None,
        None,
        "Runs that train together in a process: a number, or auto, "
        "which measures whether that is faster (default: the study's).",
    ),
}
PART: Keys = (
    WORKERS
    | TOGETHER
    | CHANGED
    | {
        "methods": (
            str | None,
            None,
            "Run only these methods now: labels, separated by commas; baselines that the study "
            "adds always run.",
        ),
        "seeds": (
            str | None,
            None,
            "Run only these seeds now (0, or 0,2, or 0-4); new ones are added to the study.",
        ),
        "settings": (
            str | None,
            None,
            "Run only these settings now: KEY=VALUE,... such as data.alpha=0.3.",
        ),
    }
)
JOB: Keys = {
    "nodes": (PositiveInt, 1, "Number of machines; sets fabric.num_nodes."),
    "gpus_per_node": (
        NonNegativeInt,
        0,
        "GPUs per machine, one process each; sets fabric.devices.",
    ),
    "tasks_per_node": (PositiveInt, 1, "Processes per machine, if gpus_per_node is 0."),
    "time": (str | None, None, "Time limit of a job, HH:MM:SS; every job needs one."),
    "partition": (str | None, None, "SLURM's partition."),
    "warning": (PositiveInt, 120, "Seconds before the limit at which the run stops itself."),
    "sbatch": (str | None, None, "Further options for sbatch: '--qos=low --exclusive'."),
    "dry_run": (bool, False, "Print the script; submit nothing."),
}
"""What a SLURM job needs."""
FIT: Keys = {
    "seed": (int, 0, "Seed of all random draws that have no seed of their own."),
    "smoke": (
        bool,
        False,
        "Smoke test: one round, few clients, two batches; synthetic data if data are missing.",
    ),
    "print_config": (bool, False, "Print the resolved config, as a file for --config, and stop."),
    "out": (str, "runs", "Folder in which the run folders are made."),
    "name": (
        str | None,
        None,
        "Name of the run folder (default: from config, or method, data, seed; and a counter).",
    ),
    "resume": (
        bool,
        False,
        "Continue run --name; if it does not exist and --config is given, start it.",
    ),
} | CHANGED

COMMANDS = {
    "fit": Command(
        "Run federated training. Later config files and flags override earlier ones. A note such "
        "as "
        "'50: KAPC on MNIST' names the source of a default ('our choice': this "
        "project's).",
        FIT,
    ),
    "test": Command("Evaluate the models of a finished run again.", RUN | CHECKPOINT),
    "export": Command(
        "Write a client's model, with code that loads it and predicts raw rows.",
        RUN
        | CHECKPOINT
        | {
            "client": (str, REQUIRED, "The client's name, or its number, from 0."),
            "out": (
                str,
                REQUIRED,
                "FILE: the file to write; it ends with .safetensors, .pt2 (torch_export) or .onnx.",
            ),
            "format": (
                Literal["safetensors", "torch_export", "onnx"],
                "safetensors",
                "Tensors, or the graph that torch traces: torch.export's, or ONNX (extra onnx).",
            ),
        },
    ),
    "join": Command(
        "Give a new client a personalised model from a finished run, which is not changed.",
        RUN
        | {
            "data": (
                str,
                REQUIRED,
                "FILE.npz: Holds x_train, y_train (omit: no labels) and, to score it, x_test, "
                "y_test.",
            ),
            "out": (str, REQUIRED, "FILE.safetensors: the file to write."),
            "rounds": (
                NonNegativeInt | None,
                None,
                "Rounds of local training, given labels (default: the run's "
                "evaluation.newcomer_rounds).",
            ),
            "architecture": (
                str | None,
                None,
                "The client's, if the run has several: its name, or its number from 0.",
            ),
        },
    ),
    "report": Command(
        "Write one HTML page on runs (or folders of runs) side by side, or on a study.",
        {
            "out": (
                str | None,
                None,
                "FILE.html: the page (default: report.html, in the run folder of a single RUN).",
            ),
            "figures": (
                Literal["svg", "pdf", "png"] | None,
                None,
                "Also write each chart to a file, in FILE-figures.",
            ),
            "accept_changed_code": (bool, False, "For a study: as in fl-train compare."),
        },
        "RUN [RUN ...] | STUDY",
    ),
    "compare": Command(
        "Compare methods over seeds, paired, in one table.",
        {
            "baseline": (
                str | None,
                None,
                "Method to compare with (default: local training, else the first).",
            ),
            "judge": (
                Judge | None,
                None,
                "Kind of model that all methods are scored by (default: each run's own).",
            ),
            "metric": (
                Literal["accuracy", "balanced_accuracy", "f1", "auroc"],
                "accuracy",
                "Score: accuracy, or one of evaluation.metrics.",
            ),
            "target": (
                PositiveShare | None,
                None,
                "Accuracy, up to 1, at which bytes and seconds are compared.",
            ),
            "format": (Form, "table", "Format of the table."),
            "out": (str | None, None, "FILE: written in place of the screen."),
            "accept_changed_code": (
                bool,
                False,
                "Compare although seeds of a row were trained with different versions of "
                "your own code; a note says so.",
            ),
            "clients": (
                bool,
                False,
                "A row for each client: samples, alone, each method, paired differences over "
                "seeds.",
            ),
            "columns": (
                str | None,
                None,
                "Columns of the table, with commas, such as mean,difference,interval.",
            ),
            "caption": (str | None, None, "Caption of the LaTeX table."),
            "label": (str | None, None, "Label of the LaTeX table, such as tab:digits."),
            "picture": (
                str | None,
                None,
                "FILE.png: the critical-difference diagram, if there are enough settings.",
            ),
        },
        "STUDY | RUN [RUN ...]",
    ),
    "dashboard": Command(
        "Save a workspace for the project at W&B or in a file.",
        {
            "entity": (str | None, None, "W&B entity (default: the user's own)."),
            "project": (str, "fl_lightning", "W&B project."),
            "name": (str, "fl_lightning", "Name of the view; a view of this name is replaced."),
            "json": (str | None, None, "FILE: write the view there and send nothing."),
        },
    ),
    "plan": Command(
        "Rehearse a round: memory, bytes and seconds of a fit. Also takes the keys of fit.",
        {
            "samples": (
                PositiveInt,
                500,
                "Training samples per client to make up if the data are missing.",
            ),
            "json": (bool, False, "Print bytes and seconds as JSON."),
        },
    ),
    "submit": Command(
        "Submit a fit to SLURM: a job that resumes, or an array. Also takes the keys of fit.",
        {
            **JOB,
            "array": (
                str | None,
                None,
                "A sweep, with a run folder for each point: 'seed=0-4 data.alpha=0.1,0.3'.",
            ),
        },
    ),
    "deploy": Command(
        "Write a Flower app that runs a method with each client at its own site. Also takes the "
        "keys of fit.",
        {
            "out": (str, REQUIRED, "DIR: a new folder for the app; the run gets its name."),
            "sites": (
                str | None,
                None,
                "DIR: also write the config's data, as one file per client, for a rehearsal.",
            ),
            "rehearse": (
                bool,
                True,
                "First run two rounds by messages and in the simulator; stop if results differ.",
            ),
        },
    ),
    "study": Command(
        "Run the missing runs of a grid of methods, settings and seeds. Keys with a dot override "
        "the study's base.",
        {
            "out": (str, REQUIRED, "DIR: the study's folder; an existing one is continued."),
            **PART,
            "slurm": (
                bool,
                False,
                "Submit the runs to SLURM as an array of jobs; the keys below describe a job.",
            ),
            **JOB,
        },
        "STUDY",
    ),
    "reproduce": Command(
        "Run the missing runs of a study of a paper's table; print its numbers beside ours.",
        {
            "out": (
                str | None,
                None,
                "DIR: the study's folder; an existing one is continued (default: studies/NAME).",
            ),
            **PART,
            "rounds": (
                int | None,
                None,
                "Number of rounds in place of the study's; the table's heading names it.",
            ),
            "format": (Form, "table", "Format of the table."),
            "no_run": (bool, False, "Run nothing; print the table of the finished runs."),
        },
        "STUDY",
    ),
    "audit": Command(
        "Measure what finished runs reveal about their clients' data.",
        {
            "out": (str, REQUIRED, "DIR: folder for audit.json, audit.csv and audit.html."),
        },
        "STUDY | RUN",
    ),
    "worth": Command(
        "Estimate what each silo gains by federating. Also takes --config FILE and keys of fit.",
        {
            "out": (
                str,
                REQUIRED,
                "DIR: folder for runs and results; an existing one is continued.",
            ),
            "methods": (
                str | None,
                None,
                "Methods besides FedAvg, separated by commas (default: fedper,ditto,selfkapc,"
                "fedcac and the config's).",
            ),
            "repeats": (
                Annotated[int, Range(2)] | None,
                None,
                "Trainings of each method, rounded up to a multiple of 5, "
                "the number of folds (default: 20).",
            ),
            "minutes": (
                PositiveFloat | None,
                None,
                "In place of repeats: as many cycles of 5 folds as end in this time.",
            ),
            "metric": (
                Literal["accuracy", "balanced_accuracy", "auroc", "mae"] | None,
                None,
                "Score of the gains (default: accuracy; for a regression mae).",
            ),
            "margin": (
                PositiveFloat | None,
                None,
                "Points below which a difference does not matter (default: 2; for mae: "
                "2 % of the mean error, in the target's unit).",
            ),
            "leave_one_out": (
                bool,
                False,
                "Also train without each silo in turn: how much the others' scores fall.",
            ),
            "curve": (
                bool,
                False,
                "Also train with 10, 25 and 50 % of each silo's samples: up to which size "
                "federating "
                "pays.",
            ),
            **WORKERS,
        },
    ),
    "tune": Command(
        "Search for methods' arguments on validation data, then run a study of these on new seeds.",
        {
            "out": (str, REQUIRED, "DIR: the search's folder; an existing one is continued."),
            "trials": (
                PositiveInt,
                20,
                "Trials of each method: the base's settings, nine random ones, then TPE's.",
            ),
            **WORKERS,
            "seed": (
                NonNegativeInt,
                1000,
                "Seed of the trials, which the study must not use. 1000: few studies do.",
            ),
            "untuned": (
                bool,
                False,
                "Also evaluate the settings that the search began from, as further rows.",
            ),
            "study": (
                bool,
                True,
                "Run the study of the chosen arguments; false: only write its file, tuned.yaml.",
            ),
            **CHANGED,
        },
        "STUDY",
    ),
    "archive": Command(
        "Pack a study into one file, or run a cell of such a file again.",
        {
            "out": (
                str | None,
                None,
                "FILE.zip: the archive (default: STUDY.zip); with --rerun a new folder for the "
                "run.",
            ),
            "rerun": (
                str | None,
                None,
                "CELL: train this cell again, such as runs/kapc/seed-0, and compare the results.",
            ),
        },
        "STUDY | FILE.zip",
    ),
    "check-method": Command(
        "Test your own method: seeds, resume, cohorts, bytes, ranks. Also takes keys of fit.",
        {
            "only": (str | None, None, "Some checks by name, separated by commas (default: all)."),
            "quick": (
                bool,
                False,
                "Only the checks of seeds, resume, cohorts, failures and bytes, in three rounds.",
            ),
            "out": (
                str | None,
                None,
                "DIR: a new folder that keeps the runs (default: they are deleted).",
            ),
        },
        "METHOD",
    ),
}
