"""The atlas as a rule: which method to take, or none, from what clients can tell before training.

    python benchmarks/atlas_rule.py [--leaves 5] [--agreement] [--picture FILE]

A tree of at most leaves - 1 questions predicts every method's points above training alone; its
advice is the method with the greatest prediction, of those that it has seen in no setting below
training alone beyond the interval. It is judged on kinds of heterogeneity that it has not seen:
each is left out in turn, with all its strengths.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from atlas_page import ALONE, RIVAL, Atlas, interval, read
from measure import markdown
from pandas import DataFrame, Series, concat, read_csv
from sklearn.tree import DecisionTreeRegressor, plot_tree

from atlas import ATLAS, FEATURES

LEAST = 2
"""Settings in a leaf: of one alone its noise would be learned."""
NOISE = 0.1
"""Points squared, mean over methods, that a question must explain. Ours: the variance of means over
ten seeds."""


def features(atlas: Atlas, folder: Path, agreement: bool = False) -> DataFrame:
    """`FEATURES` of the atlas's settings, a row for each; `agreement`: also that of the clients'
    first updates."""
    names = {"settings": list(FEATURES)} | ({"agreement": ["agreement"]} if agreement else {})
    tables = [
        read_csv(folder / f"{name}.csv", dtype={"strength": str}).set_index(["kind", "strength"])[
            columns
        ]
        for name, columns in names.items()
    ]
    return concat(tables, axis=1).loc[atlas.settings].astype(float)


def gains_of(atlas: Atlas) -> np.ndarray:
    """Mean points above training alone, (settings, methods); who has no number has the least of the
    setting."""
    means = atlas.against(ALONE).mean(axis=-1)
    return np.where(np.isnan(means), np.nanmin(means, axis=1, keepdims=True), means)


def grown(x: DataFrame, gains: np.ndarray, leaves: int) -> DecisionTreeRegressor:
    """The tree of mean gains (settings, methods)."""
    tree = DecisionTreeRegressor(
        max_leaf_nodes=leaves, min_samples_leaf=LEAST, min_impurity_decrease=NOISE, random_state=0
    )
    return tree.fit(x, gains)


def harmless(atlas: Atlas, settings: np.ndarray) -> np.ndarray:
    """Bool (methods,): in all `settings` (bool) with numbers, in none below training alone beyond
    the interval."""
    gains = atlas.against(ALONE)[settings]
    _, high = interval(gains)
    return np.asarray(((high >= 0) & ~np.isnan(gains).any(axis=-1)).all(axis=0))


def advised(tree: DecisionTreeRegressor, x: DataFrame, allowed: np.ndarray) -> np.ndarray:
    """The method's place for each row of x, of those that are `allowed`."""
    return np.asarray(np.where(allowed, tree.predict(x), -np.inf).argmax(axis=1))


def left_out(atlas: Atlas, x: DataFrame, leaves: int) -> np.ndarray:
    """The advice for each setting by the tree of all other kinds."""
    gains = gains_of(atlas)
    kinds = np.array([kind for kind, _ in atlas.settings])
    advice = np.zeros(len(kinds), int)
    for kind in dict.fromkeys(kinds):
        others = kinds != kind
        tree = grown(x[others], gains[others], leaves)
        advice[kinds == kind] = advised(tree, x[kinds == kind], harmless(atlas, others))
    return advice


def over_kinds(atlas: Atlas, points: np.ndarray) -> str:
    """The mean over kinds of (settings,) points, with Student's interval."""
    means = (
        Series(points).groupby([kind for kind, _ in atlas.settings], sort=False).mean().to_numpy()
    )
    low, high = map(float, interval(means))
    return f"{means.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


def judged(atlas: Atlas, advice: np.ndarray) -> list[str]:
    """The advice for kinds unseen, in Markdown, and its regret beside that of always taking
    `RIVAL`."""
    means = gains_of(atlas)
    every = np.arange(len(means))
    best, rival = means.max(axis=1), means[:, atlas.methods.index(RIVAL)]
    regret, of_rival = best - means[every, advice], best - rival
    rows = []
    for c, setting in enumerate(atlas.settings):
        harmed = atlas.harmed[c, advice[c]].mean()
        winner = atlas.methods[int(means[c].argmax())]
        cells = [
            atlas.methods[advice[c]],
            f"{regret[c]:.1f}",
            winner,
            f"{of_rival[c]:.1f}",
            f"{harmed:.0f} %",
        ]
        rows.append([atlas.name(setting), *cells])
    unharmed = np.where(harmless(atlas, np.full(len(means), True)), means, -np.inf).max(axis=1)
    kinds = len({kind for kind, _ in atlas.settings})
    head = [
        "setting",
        "advice",
        "its regret",
        "best",
        "regret of FedAvg, after",
        "harmed by the advice",
    ]
    lines = [
        *markdown(head, rows),
        "",
        f"Regret minus that of FedAvg judged after local training, mean over {kinds} kinds, in "
        f"points:",
        "",
        f"- the advice: {over_kinds(atlas, regret - of_rival)};",
        f"- each setting's best method, in hindsight: {over_kinds(atlas, -of_rival)};",
        f"- of those that are below training alone in no setting: "
        f"{over_kinds(atlas, rival - unharmed)}.",
        "",
    ]
    _, above = interval(atlas.against(ALONE)[every, advice])
    worse = [
        atlas.name(setting) for setting, end in zip(atlas.settings, above, strict=True) if end < 0
    ]
    harmful = ", ".join(worse) or "none"
    return [
        *lines,
        f"Settings in which the advice is significantly below training alone: {harmful}.",
    ]


def leaves_of(tree: DecisionTreeRegressor, atlas: Atlas) -> dict[int, str]:
    """By node, what a leaf advises: the method and its mean points above training alone in the
    leaf's settings."""
    inner, allowed = tree.tree_, harmless(atlas, np.full(len(atlas.settings), True))
    words = {}
    for node in range(inner.node_count):
        gains = inner.value[node, :, 0]
        if inner.children_left[node] < 0:
            best = int(np.where(allowed, gains, -np.inf).argmax())
            words[node] = (
                f"{atlas.methods[best]} ({gains[best]:+.1f}, {inner.n_node_samples[node]} settings)"
            )
    return words


def without_idle_questions(tree: DecisionTreeRegressor, atlas: Atlas) -> DecisionTreeRegressor:
    """The tree, changed: no question is left whose answers come to the same advice."""
    inner = tree.tree_
    for node in reversed(in_order(tree)):
        left, right = inner.children_left[node], inner.children_right[node]
        words = leaves_of(tree, atlas)
        if {left, right} <= words.keys() and words[left].split(" (")[0] == words[right].split(" (")[
            0
        ]:
            # what scikit-learn has for a leaf
            inner.children_left[node] = inner.children_right[node] = -1
    return tree


def written(tree: DecisionTreeRegressor, atlas: Atlas, node: int = 0, depth: int = 0) -> list[str]:
    """The tree as nested lines."""
    inner, leaves = tree.tree_, leaves_of(tree, atlas)
    if node in leaves:
        return [f"{'    ' * depth}{leaves[node]}"]
    name, limit = tree.feature_names_in_[inner.feature[node]], inner.threshold[node]
    lines = []
    for child, sign in ((inner.children_left[node], "<="), (inner.children_right[node], ">")):
        lines += [
            f"{'    ' * depth}{name} {sign} {limit:.3g}:",
            *written(tree, atlas, int(child), depth + 1),
        ]
    return lines


def in_order(tree: DecisionTreeRegressor, node: int = 0) -> list[int]:
    """The nodes as they are drawn: each before its children, the left one first. Their numbers are
    those of growth."""
    inner = tree.tree_
    if inner.children_left[node] < 0:
        return [node]
    left, right = (
        in_order(tree, int(children[node]))
        for children in (inner.children_left, inner.children_right)
    )
    return [node, *left, *right]


def draw(tree: DecisionTreeRegressor, atlas: Atlas, file: Path) -> None:
    """The tree as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.3 + tree.get_depth()), layout="constrained")
    inner, leaves = tree.tree_, leaves_of(tree, atlas)
    boxes = plot_tree(
        tree, ax=axes, feature_names=list(tree.feature_names_in_), impurity=False, fontsize=9
    )
    shown = [box for box in boxes if "samples" in box.get_text()]  # not the words on its edges
    for node, box in zip(in_order(tree), shown, strict=True):
        assert f"samples = {inner.n_node_samples[node]}\n" in box.get_text()
        question = f"{tree.feature_names_in_[inner.feature[node]]} <= {inner.threshold[node]:.3g}?"
        box.set_text(leaves[node].replace(" (", "\n(") if node in leaves else question)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=5)
    parser.add_argument(
        "--agreement", action="store_true", help="ask for that of the first updates, too"
    )
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    atlas = read(ATLAS)
    x = features(atlas, ATLAS, given.agreement)
    print(*judged(atlas, left_out(atlas, x, given.leaves)), sep="\n")
    tree = without_idle_questions(grown(x, gains_of(atlas), given.leaves), atlas)
    print("\nThe rule, of all kinds:\n", *written(tree, atlas), sep="\n")
    if given.picture:
        draw(tree, atlas, given.picture)
