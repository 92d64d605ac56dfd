"""Trains one run, from its settings to its folder; a stopped run is resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fl_lightning.configuration.config import Config
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve, start_of
from fl_lightning.configuration.tables import check_first_rows
from fl_lightning.foundation import command, signals
from fl_lightning.results import opening
from fl_lightning.results.provenance import run_name


def train(layers: list[Layer], config_name: str | None) -> Path:
    """Trains a run with the settings of `layers`.

    Args:
        layers: settings in order of precedence, later ones winning.
        config_name: the config file, after which the run folder is named unless `layers` set
            `name`. None: the folder is named after the method.

    Returns:
        The run folder.
    """
    start = start_of(layers)
    # resolving a config imports torch, which takes seconds
    with signals.exit_at_signal(
        lambda: "fl-train: stopped before the run began; nothing is written"
    ):
        opening.check_name(start)
        opening.check_first_start(start, config_name is not None)
        saved = opening.settings_to_resume(start)
        if saved is None:
            check_first_rows(layers)
        config = config_of_run(layers, config_name, saved)
        opening.check_no_key(config)
        if saved is not None:
            place = Path(start.out) / str(start.name)
            opening.check_resumable(saved, config, place, start.accept_changed_code)
    # the command that resumes the run, if it was typed like that
    again = command.line() if command.words and start.name and start.resume else None
    stem = Path(config_name or "").stem or run_name(config)
    with opening.open_run_folder(start, stem, config) as folder:
        goes_on = partial(opening.resume_line, folder, again)
        with signals.exit_at_signal(goes_on):  # the imports take seconds
            from fl_lightning.lab.datacheck.telling import assemble_with_findings
            from fl_lightning.run import fit
        # a new run also prints suspicious columns of its table
        put_together = None if saved else assemble_with_findings
        with opening.say_when_stopped(goes_on):
            fit(config, folder, start.resume, put_together=put_together)
    return folder


def config_of_run(
    layers: list[Layer],
    config_name: str | None,
    saved: Layer | None,
) -> Config:
    """Merges and checks the settings of a run.

    A run that is resumed without a config file has its saved settings, with those of `layers` on
    top. In all other cases `layers` alone count.

    Args:
        layers: settings of the command line or the call, including those of a config file.
        config_name: the config file; None if none is given.
        saved: the saved settings of the run to resume; None for a new run.
    """
    return resolve([saved, *layers] if saved and config_name is None else layers)
