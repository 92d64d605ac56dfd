"""A run, from settings to its folder: begun, or gone on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fl_lightning.configuration.config import Config
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve, start_of
from fl_lightning.configuration.tables import check_first_rows
from fl_lightning.foundation import command, signals
from fl_lightning.results import opening
from fl_lightning.results.provenance import name_of


def train(layers: list[Layer], config_name: str | None) -> Path:
    """Trains a run as `layers` say, in the folder `--name`, else one named after `config_name` (a
    file) or the method.

    Returns:
        The run folder.
    """
    start = start_of(layers)
    # To resolve a config takes seconds: it imports torch.
    with signals.exit_at_signal(
        lambda: "fl-train: stopped before the run began; nothing is written"
    ):
        opening.check_name(start)
        opening.check_first_start(start, config_name is not None)
        saved = opening.saved_of(start)
        if saved is None:
            check_first_rows(layers)
        config = config_of_run(layers, config_name, saved)
        opening.check_no_key(config)
        if saved is not None:
            place = Path(start.out) / str(start.name)
            opening.check_goes_on(saved, config, place, start.accept_changed_code)
    # the command that goes on with the run, where this one was typed and does the same
    again = command.line() if command.words and start.name and start.resume else None
    stem = Path(config_name or "").stem or name_of(config)
    with opening.opened(start, stem, config) as folder:
        goes_on = partial(opening.goes_on, folder, again)
        with signals.exit_at_signal(goes_on):  # it takes seconds
            from fl_lightning.lab.datacheck.telling import assembled
            from fl_lightning.run import fit
        # a new run also says what stands out in the columns of its table
        put_together = None if saved else assembled
        with opening.when_stopped(goes_on):
            fit(config, folder, start.resume, put_together=put_together)
    return folder


def config_of_run(
    layers: list[Layer],
    config_name: str | None,
    saved: Layer | None,
) -> Config:
    """Returns the config of a run. Resumed without a config file, it is as the run was (`saved`),
    save for what `layers` say."""
    return resolve([saved, *layers] if saved and config_name is None else layers)
