"""Whether the intervals hold what they promise, on simulated studies.

RunResult as a program, this prints the table of docs/decisions/0023 (some 10 minutes).
"""

import itertools
from functools import partial

import numpy as np
import pytest
from pandas import DataFrame, Series
from scipy.special import ndtr, ndtri

from fl_lightning.lab import statistics
from fl_lightning.lab.study.compare import compare_runs
from fl_lightning.lab.study.scores import COLUMNS
from fl_lightning.results.result import RunResult

STUDIES = 1000
CLIENTS = 10
DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: (rng.gamma(2, size=shape) - 2) / np.sqrt(2),
    "lognormal": lambda rng, shape: (
        (rng.lognormal(0, 0.75, shape) - np.exp(0.28125)) / np.sqrt(np.exp(1.125) - np.exp(0.5625))
    ),
    "heavy": lambda rng, shape: rng.standard_t(5, size=shape) / np.sqrt(5 / 3),
}
"""Of mean 0 and variance 1."""


def studies(rng, seeds, spread, draw):
    """Differences (studies, seeds, clients) of mean 0: of seeds with this spread, and of clients
    with a spread of 1."""
    return spread * draw(rng, (STUDIES, seeds, 1)) + draw(rng, (STUDIES, seeds, CLIENTS))


def covered(intervals):
    return float(np.mean((intervals[0] <= 0) & (intervals[1] >= 0)))


def at_once(made, of):
    """`of` of studies (studies, seeds, clients) with one setting, a hundred at a time, which share
    their draws."""
    parts = np.array_split(made, -(-len(made) // 100))
    return np.concatenate(
        [np.stack(of([[part[:, s]] for s in range(made.shape[1])])) for part in parts], axis=1
    )


def bca(differences):
    """The plain hierarchical BCa interval (Efron, 1987), accelerated by leaving out seeds."""
    means = statistics.seed_means(differences)
    middle = means.mean(axis=1, keepdims=True)
    drawn = statistics.resampled(differences, 999, np.random.default_rng(0)).mean(axis=2)
    away = means - middle
    a = ((away**3).sum(axis=1) / (6 * (away**2).sum(axis=1) ** 1.5))[:, None]
    z0 = ndtri(np.clip((drawn < middle).mean(axis=1, keepdims=True), 0.001, 0.999))
    ends = z0 + ndtri([0.025, 0.975])
    levels = ndtr(z0 + ends / (1 - a * ends))
    low, high = np.transpose([np.quantile(d, p) for d, p in zip(drawn, levels, strict=True)])
    return low, high


def intervals(made):
    """Those that `compare_runs` gives: 3,999 draws leave 0.25 points in each tail, which do not average
    out over studies."""
    few = made.shape[1] < statistics.FEW
    found = at_once(
        made, statistics.t_interval if few else partial(statistics.outer, resamples=3_999)
    )
    for study in (0, len(made) - 1):
        low, high, kind = statistics.interval(
            [[clients] for clients in made[study]], resamples=3_999
        )
        assert (low, high) == pytest.approx(tuple(found[:, study])) and kind == (
            "t" if few else "bootstrap"
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 6, 10])
@pytest.mark.parametrize(
    "spread", [0.0, 0.3, 3.0], ids=["none over seeds", "as of clients' means", "far more"]
)
def test_the_interval_covers_93_to_97_percent(seeds, spread):
    made = studies(np.random.default_rng(seeds), seeds, spread, DRAWS["normal"])
    assert 0.93 <= covered(intervals(made)) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("draw", ["skewed", "heavy"])
def test_from_five_seeds_on_it_does_so_too_where_seeds_are_not_normal(draw, spread, seeds):
    made = studies(np.random.default_rng(seeds), seeds, spread, DRAWS[draw])
    assert 0.93 <= covered(intervals(made)) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods, seeds, settings, shared",
    [(1, 6, 1, 0.0), (4, 10, 1, 0.0), (1, 4, 3, 0.0), (3, 6, 3, 1.0)],
)
def test_the_same_method_twice_has_a_star_in_at_most_5_percent_of_studies(
    methods,
    seeds,
    settings,
    shared,
    monkeypatch,
    tmp_path,
):
    """The baseline and `methods` are one method with seeds of its own; a study counts if any row of
    it has a star.

    `shared`: spread of what a seed brings to all settings alike, where a setting with a seed brings
    1.
    """
    # a star is a test's
    monkeypatch.setattr(statistics, "interval", lambda differences: (0.0, 0.0, "t"))
    rng = np.random.default_rng(0)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    run = RunResult(tmp_path)
    starred = 0
    for _ in range(STUDIES):
        scores = rng.normal(size=(methods + 1, settings, seeds, 1)) + rng.normal(
            size=(methods + 1, settings, seeds, 4)
        )
        scores += shared * rng.normal(size=(methods + 1, 1, seeds, 1))
        units = itertools.product(range(methods + 1), range(settings), range(seeds))
        rows = [
            (str(m), "any", str(k), s, "after", "accuracy", "", "", run, Series(scores[m, k, s]))
            for m, k, s in units
        ]
        runs = DataFrame(rows, columns=[*COLUMNS, "scores"])
        starred += any(compare_runs(runs, "0").table.star == "*")
    assert 0 < starred <= 0.05 * STUDIES


def width(intervals):
    return float(np.median(intervals[1] - intervals[0]))


if __name__ == "__main__":
    for name, draw in DRAWS.items():
        for spread in (0.0, 0.3, 3.0):
            for seeds in (3, 4, 5, 6, 10):
                made = studies(np.random.default_rng(seeds), seeds, spread, draw)
                kinds = {
                    "t": at_once(made, statistics.t_interval),
                    "bootstrap-t": at_once(made, partial(statistics.bootstrap, resamples=3_999)),
                    "outer ends": at_once(made, partial(statistics.outer, resamples=3_999)),
                    "BCa": at_once(made, bca),
                }
                shown = (
                    f"{kind} {100 * covered(i):.1f} ({width(i):.2f})" for kind, i in kinds.items()
                )
                print(
                    f"{name:9s} spread {spread:3.1f} seeds {seeds:2d}: {', '.join(shown)}",
                    flush=True,
                )
