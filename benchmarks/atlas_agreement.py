"""How alike the clients' first updates are in the atlas's settings: a question more for its rule.

    python benchmarks/atlas_agreement.py OUT      one round of FedAvg in each setting, with all ten seeds
    python benchmarks/atlas_rule.py --agreement   the rule with this question

The agreement of a setting is the mean cosine of two clients' changes in the first round, over pairs
and seeds. It is kept in atlas/agreement.csv.
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from atlas import ATLAS, KINDS, Row
from fl_lightning.callbacks.graphs import cosines
from fl_lightning.callbacks.relations import Relation, SampleCounts
from fl_lightning.cli import main, studyfile
from fl_lightning.core import RelationInputs, RunContext
from fl_lightning.foundation.csvtable import as_csv
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.scores import read
from fl_lightning.methods.fedavg import FedAvg


class Measured(SampleCounts):
    """FedAvg's weights; keeps the mean cosine of two clients' changes since the initial model."""

    inner_products = True

    def weights(self, inputs: RelationInputs) -> Tensor:
        """(1, 1, n)."""
        alike = cosines(inputs.gram("initial").total().full[0])
        n = len(alike)
        self.agreement = float((alike.sum() - alike.trace()) / (n * (n - 1)))
        return super().weights(inputs)


@dataclass(frozen=True)
class Agreement(FedAvg):
    """FedAvg; `agreement` in its run's summary is that of the last round's uploads."""

    several = False

    def relation(self) -> Relation:
        """The mean, measured."""
        return Measured()

    def summary(self, run: RunContext) -> dict[str, Any]:
        """With `agreement`."""
        assert isinstance(run.relation, Measured)
        return super().summary(run) | {"agreement": run.relation.agreement}


def measured(out: Path, kind: str) -> Iterator[Row]:
    """The agreement in each setting of a kind, from one round with each of its seeds."""
    study = studyfile.read(f"atlas/{kind}") | {
        "methods": [{"name": "atlas_agreement.Agreement"}],
        "forced": False,
    }
    file = out / f"{kind}.yaml"
    write_whole(file, yaml.safe_dump(study, sort_keys=False))
    words = ["--workers", "1", "--federation.rounds", "1", "--evaluation.every", "1"]
    if code := main(["study", str(file), "--out", str(out / kind), *words]):
        sys.exit(code)
    cells, _ = read([out / kind])
    for setting, runs in cells.groupby("setting", sort=False).run:
        values = [float(run.summary["agreement"]) for run in runs]
        yield {
            "kind": kind,
            "strength": setting.rpartition("=")[2],
            "agreement": float(np.mean(values)),
        }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in KINDS if (ATLAS / f"{kind}.yaml").is_file()]
    write_whole(
        ATLAS / "agreement.csv", as_csv([row for kind in kinds for row in measured(place, kind)])
    )
