"""Pictures of the data split, of the relation and of the scores."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import are_numbers, check
from fl_lightning.core import RelationView, RoundRecord, RunContext
from fl_lightning.drawing.curves import draw_scores
from fl_lightning.drawing.heatmap import save_png
from fl_lightning.drawing.relation import draw_client, draw_overview, draw_split
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import MachineFailed
from fl_lightning.foundation.extras import hint_if_missing
from fl_lightning.results.columns import evenly_spaced
from fl_lightning.results.folder import RunFolder

DRAWN = 6
"""Default number of rounds with files and pictures of single clients: a run folder keeps few files,
and the report shows up to a hundred rounds from `relation/`. Ours."""
OVERVIEW = "relation/overview"


class Heatmaps(Observer):
    """Draw the relation, receivers × sources over all layers, for loggers in every round.

    In chosen rounds also layers × clients for chosen receivers (as figure 2 of KAPC does), and all
    of these as files; at the end the scores by round. In all pictures the colours of weights run
    from 0 to 1 on a square root scale. A picture takes some 15 to 35 ms. Without matplotlib, or if
    a file cannot be written, a run says so once and goes on.
    """

    stage = "draw"

    def __init__(
        self,
        every: int | None = None,
        clients: list[int] | None = None,
        png: bool = True,
    ) -> None:
        """Set the options.

        Args:
            every: pictures are drawn in every so-many-th round, and in the last; None: in six
                rounds spread over the run.
            clients: numbers of the receivers whose rows are drawn; None: 0, 1 and 2 if they take
                part, else the first three of the cohort.
            png: also write `figures/` in the run folder.
        """
        key = self.config_key
        valid = every is None or every >= 1
        check(f"{key}.every", every, valid, "it must be at least 1, or null")
        numbers = are_numbers(clients)
        check(
            f"{key}.clients",
            clients,
            numbers,
            "it must be a list of client numbers",
        )
        self.every = every
        self.clients = clients
        self.png = png
        self._split_drawn = self._warned = False
        self._absent = hint_if_missing("matplotlib")

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` for a client number that does not exist."""
        key = f"{self.config_key}.clients"
        for client in self.clients or []:
            exists = 0 <= client < run.clients
            check(key, client, exists, f"clients are numbered 0 to {run.clients - 1}")
        if self._absent and run.is_main:
            silence = "without this line: --callbacks.heatmaps null"
            log.say(f"callbacks.heatmaps: no pictures, {self._absent}; {silence}")

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Draw the pictures into `record.images`."""
        if not run.is_main or self._absent:
            return
        if run.data.task == "classification" and run.data.holds_all and not self._split_drawn:
            self._split_drawn = True
            data = run.data
            split = draw_split(data.class_counts, data.client_names, data.class_names)
            self._save(run, "split", split)
            record.images["data/split"] = split
        t = record.round
        is_chosen = self._is_chosen(run, t)
        if is_chosen or run.config.loggers:
            images = self.pictures(run, record.relation, t)
            record.images |= images
            for name, image in images.items() if is_chosen else ():
                self._save(run, f"round-{t:04d}-{name.removeprefix('relation/')}", image)

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Draw the scores by round."""
        if run.is_main and self.png and not self._absent:
            rows = RunFolder(run.folder).read("metrics")
            curves = draw_scores(rows, run.metric, run.judge, run.folder.name)
            self._save(run, f"{run.metric.name}-by-round", curves)

    def pictures(
        self,
        run: RunContext,
        view: RelationView,
        t: int,
    ) -> dict[str, np.ndarray]:
        """Return the pictures of the relation in round `t`, by their names for loggers."""
        images: dict[str, np.ndarray] = {}
        if view.rows.size == 0 or self._absent:
            return images
        names = run.data.client_names
        if self._is_chosen(run, t):
            for client in self._chosen_clients(view.receivers):
                images[f"relation/client-{client:03d}"] = draw_client(
                    view,
                    client,
                    t,
                    names,
                )
        images[OVERVIEW] = draw_overview(view, t, names)
        return images

    def _save(
        self,
        run: RunContext,
        name: str,
        image: np.ndarray,
    ) -> None:
        try:
            if self.png:
                save_png(image, run.folder / "figures" / f"{name}.png")
        except (OSError, MachineFailed) as error:
            if not self._warned:
                problem = f"figures/{name}.png cannot be written ({error})"
                log.say(f"callbacks.heatmaps: {problem}; the run goes on")
            self._warned = True

    def _is_chosen(
        self,
        run: RunContext,
        round: int,
    ) -> bool:
        if self.every is None:
            return round in evenly_spaced(run.rounds, DRAWN)
        return round % self.every == 0 or round == run.rounds

    def _chosen_clients(self, receivers: list[int]) -> list[int]:
        if self.clients is not None:
            return [client for client in self.clients if client in receivers]
        return [0, 1, 2] if {0, 1, 2} <= set(receivers) else receivers[:3]
