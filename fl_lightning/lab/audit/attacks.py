"""Attacks on what was observed, as rows: what a viewer learns, with an interval, beside what chance
gives.

Membership: loss threshold (Yeom et al., CSF 2018) on one run; online LiRA (Carlini et al., S&P
    2022, Algorithm 1) over
runs of other seeds, in which the same sample was a training sample or a test sample of a client: no
shadow model is trained. Its Gaussians have a mean for each sample and, since there are few runs,
one variance for all.

Both have two further versions, for an attacker who saw models in several rounds. One goes by the
mean of a sample's confidence over the rounds kept; the other by its rise from the first of them to
the last, in which the first model tells how hard a sample is (difficulty calibration: Watson, Guo,
Cormode, Sablayrolles, ICLR 2022, with other models). Nasr, Shokri, Houmansadr (S&P 2019) let a
passive attacker of federated learning train a network on the gradients and activations of several
rounds, Liu, Zhao, Backes, Zhang (CCS 2022) one on losses along training: both learn more so than
from the last model. Theirs are stronger attacks than a mean or a difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from fl_lightning.lab.audit.observe import VIEWS, Confidence, Observed

DRAWS = 200
"""Bootstraps of an interval and permutations of chance (ours): intervals of 95 % to a tenth of
their width."""
CONTROL = "AUC, control: memberships shuffled"
LEVELS = {"true positives at 1 % false": 0.01, "true positives at 0.1 % false": 0.001}
FEWEST = 40
"""Ways to divide the clients into groups of their sizes, below which 95 % of permutations include
the right one."""
SHUFFLES = 20
"""Of memberships, for what LiRA and thresholds give by chance (ours): their spread is known to a
sixth."""
FLIPPED = "trained on flipped labels (callbacks.attack): their samples are left out"
"""What the page says of some clients (`Observed.flipped`)."""
FEW = 20
"""Members and others that a client must have for an AUC of its own."""


class Finding(NamedTuple):
    """What a viewer learns by an attack."""

    method: str
    viewer: str
    attack: str
    measure: str
    value: float
    low: float
    high: float
    """A bootstrap interval of 95 % of `value`; of an attack on the relation, what 95 % of
    permutations give; of a control, what 95 % of shuffles give, and `value` is their mean."""
    chance: float
    """What guessing gives."""
    samples: int
    runs: int = 1
    rounds: int = 1
    """Rounds whose models were looked at."""


def finding(
    named: tuple[str, str, str, str],
    value: float,
    drawn: Sequence[float],
    chance: float,
    samples: int,
    runs: int = 1,
    rounds: int = 1,
) -> Finding:
    """A finding; its interval holds 95 % of the `drawn` values. `named`: method, viewer, attack and
    measure."""
    known = [one for one in drawn if one == one]
    low, high = np.percentile(known, [2.5, 97.5]).tolist() if known else (math.nan, math.nan)
    return Finding(*named, value, low, high, chance, samples, runs, rounds)


Labelled = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Client, member and score of each sample."""


def auc(member: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; NaN unless there are members and others."""
    m = int(member.sum())
    if not 0 < m < len(member):
        return float("nan")
    ranks = rankdata(score)  # from 1; equal scores share theirs
    return float((ranks[member].sum() - m * (m + 1) / 2) / (m * (len(member) - m)))


def membership(
    method: str,
    view: str,
    attack: str,
    scored: Labelled,
    runs: int,
    controls: Sequence[Labelled],
    rounds: int = 1,
) -> list[Finding]:
    """AUC over all clients and for single ones, true positives at low false ones, and the control.

    `controls`: the same attack on memberships that were shuffled within each client, once each.
    """
    _, member, score = scored
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(member), len(member)) for _ in range(DRAWS)]

    def row(measure: str, value: float, drawn: Sequence[float], chance: float, n: int) -> Finding:
        named = (method, view, attack, measure)
        return finding(named, value, drawn, chance, n, runs, rounds)

    rows = [
        row("AUC", auc(member, score), [auc(member[d], score[d]) for d in draws], 0.5, len(member))
    ]
    drawn = [auc(shuffled, mixed) for _, shuffled, mixed in controls]
    rows.append(row(CONTROL, float(np.mean(drawn)), drawn, 0.5, len(member)))
    for words, level in LEVELS.items():
        drawn = [_true(member[d], score[d], level) for d in draws]
        rows.append(row(words, _true(member, score, level), drawn, level, len(member)))
    return rows + _by_client(scored, row)


def shuffle(client: np.ndarray, member: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Memberships permuted within each client (and so as many members as before)."""
    mixed = member.copy()
    for c in np.unique(client):
        mixed[client == c] = rng.permutation(member[client == c])
    return mixed


def _true(member: np.ndarray, score: np.ndarray, level: float) -> float:
    """Members above the least threshold that at most `level` of the others exceed."""
    others = score[~member]
    if not len(others) or not member.any():
        return float("nan")
    threshold = np.sort(others)[-1 - int(level * len(others))]
    return float((score[member] > threshold).mean())


def _by_client(scored: Labelled, row: Callable[..., Finding]) -> list[Finding]:
    """The worst client, and small against large ones."""
    client, member, score = scored
    own, sizes = {}, {}
    for c in np.unique(client):
        mine = client == c
        if min(member[mine].sum(), (~member[mine]).sum()) >= FEW:
            own[c], sizes[c] = auc(member[mine], score[mine]), int(member[mine].sum())
    if not own:
        return []
    rows = [
        row("AUC, mean over clients", float(np.mean(list(own.values()))), (), 0.5, len(own)),
        row("AUC, worst client", max(own.values()), (), 0.5, len(own)),
    ]
    middle = float(np.median(list(sizes.values())))
    for words, small in (
        ("AUC, clients with fewer samples", True),
        ("AUC, clients with more samples", False),
    ):
        values = [own[c] for c in own if (sizes[c] <= middle) == small]
        if values:
            rows.append(row(words, float(np.mean(values)), (), 0.5, len(values)))
    return rows


def thresholds(run: Observed) -> list[Finding]:
    """Loss threshold on one run, in the eyes of each viewer that sees a model."""
    rows, s = [], run.samples
    rng = np.random.default_rng(1)
    mixed = [shuffle(s.client, s.member, rng) for _ in range(SHUFFLES)]
    for words, rounds, [seen] in _seen([run]):
        for view in VIEWS:
            score, attack = seen[view], f"loss threshold{words}"
            if len(score) and not np.isnan(score).any():
                controls = [(s.client, members, score) for members in mixed]
                rows += membership(
                    run.method, view, attack, (s.client, s.member, score), 1, controls, rounds
                )
    return rows


def _seen(runs: Sequence[Observed]) -> list[tuple[str, int, list[Confidence]]]:
    """What an attacker goes by in each run, as words and the number of rounds: the last round;
    where all of the runs have kept the same further rounds, also each of `over_rounds`."""
    last = ("", 1, [run.samples.confidence for run in runs])
    rounds, several = runs[0].rounds, runs[0].samples.over_rounds
    if any(run.rounds != rounds for run in runs):
        return [last]
    ways = [
        (f", {way} over rounds", [run.samples.over_rounds[way] for run in runs]) for way in several
    ]
    return [last, *((words, len(rounds), seen) for words, seen in ways)]


def lira(runs: Sequence[Observed]) -> list[Finding]:
    """Online LiRA over runs of one method that differ by their seed."""
    rows = []
    for words, rounds, seen in _seen(runs):
        for view in VIEWS:
            scores = [confidence[view] for confidence in seen]
            if any(np.isnan(score).any() for score in scores):
                continue
            truth, attack = (
                attacked(runs, scores, [run.samples.member for run in runs]),
                f"LiRA{words}",
            )
            if len(set(truth[1].tolist())) == 2:
                controls = by_chance(runs, scores)
                rows += membership(runs[0].method, view, attack, truth, len(runs), controls, rounds)
    return rows


def by_chance(runs: Sequence[Observed], scores: Sequence[np.ndarray]) -> list[Labelled]:
    """LiRA on memberships that were shuffled within each client of each run, `SHUFFLES` times."""
    rng = np.random.default_rng(1)
    draws = [
        [shuffle(run.samples.client, run.samples.member, rng) for run in runs]
        for _ in range(SHUFFLES)
    ]
    return [attacked(runs, scores, members) for members in draws]


def attacked(
    runs: Sequence[Observed], scores: Sequence[np.ndarray], members: Sequence[np.ndarray]
) -> Labelled:
    """LiRA's log likelihood ratios of the samples that have one.

    A sample has one in a run where among the other runs it was trained on in some, and only tested
    on in others.
    """
    client = np.concatenate([k * 10**6 + run.samples.client for k, run in enumerate(runs)])
    digest = np.concatenate([run.samples.digest for run in runs])
    member, score = np.concatenate(members), np.concatenate(scores)
    same = np.unique(digest, return_inverse=True)[1]
    ratio = np.zeros(len(score))
    kept = np.ones(len(score), dtype=bool)
    for kind, sign in ((True, 1), (False, -1)):
        own = (member == kind).astype(np.float64)
        count, total = np.bincount(same, own)[same], np.bincount(same, own * score)[same]
        several = (own > 0) & (count > 1)
        within = score[several] - (total / np.maximum(count, 1))[several]
        spread = max(float(np.std(within)) * 2**0.5, 1e-6) if several.any() else 1.0
        others, summed = count - own, total - own * score
        kept &= others > 0
        mean = summed / np.maximum(others, 1)
        ratio -= sign * (((score - mean) / spread) ** 2 / 2 + np.log(spread))
    return client[kept], member[kept], ratio[kept]


# ---------------------------------------------------------------- the relation, and label mixes


def relations(run: Observed) -> list[Finding]:
    """From the relation, by layer: who shares a group, and how alike two clients' label mixes are.

    The server sees the whole cube, another client its own row: its measure is the mean over
    clients.
    """
    rows: list[Finding] = []
    apart = ~np.eye(len(run.counts), dtype=bool)
    shares = run.counts / run.counts.sum(1, keepdims=True).clip(1)
    alike = 1 - np.abs(shares[:, None] - shares[None]).sum(2) / 2
    same = np.equal.outer(run.groups, run.groups)
    for layer, R in run.relation.items():
        columns = [R[apart[:, j], j] for j in range(len(R))]
        # nobody's, or one row for all: sample counts
        if not R[apart].any() or max(map(np.ptp, columns)) < 1e-6:
            continue
        if len(set(run.groups)) > 1 and not too_few(run):
            rows += _related(run, layer, R, same, "who shares a group", "AUC", auc, 0.5)
        rows += _related(
            run, layer, R, alike, "how alike label mixes are", "rank correlation", _ranked, 0.0
        )
    return rows


def too_few(run: Observed) -> list[str]:
    """Why the relation's groups cannot be told from luck: so few ways to divide the clients that
    one in 40 is right."""
    sizes = sorted(Counter(run.groups).values())
    if not run.relation or len(sizes) < 2:
        return []
    ways = math.factorial(len(run.groups))
    for size, times in Counter(sizes).items():
        ways //= math.factorial(size) ** times * math.factorial(times)
    words = (
        f"{len(run.groups)} clients in groups of {', '.join(map(str, sizes))} can be divided in "
        f"{ways} ways only"
    )
    return (
        [f"{words}: whether the relation tells who shares a group is not tested"]
        if ways < FEWEST
        else []
    )


def _related(
    run: Observed,
    layer: str,
    R: np.ndarray,
    truth: np.ndarray,
    question: str,
    measure: str,
    of: Callable[[np.ndarray, np.ndarray], float],
    chance: float,
) -> list[Finding]:
    n = len(R)
    apart, rng = ~np.eye(n, dtype=bool), np.random.default_rng(0)
    orders = [rng.permutation(n) for _ in range(DRAWS)]

    def whole(T: np.ndarray) -> float:
        return of(T[apart], R[apart])

    def single(T: np.ndarray) -> float:
        return _mean([of(T[i, apart[i]], R[i, apart[i]]) for i in range(n)])

    rows = []
    for viewer, value in (("server: relation", whole), ("another client: its row", single)):
        permuted = [
            value(truth[np.ix_(order, order)])
            for order in orders[: DRAWS if viewer[0] == "s" else DRAWS // 4]
        ]
        where = f"layer {layer}" if layer != "mean" else "mean over layers"
        named = (run.method, viewer, question, f"{measure}, {where}")
        rows.append(finding(named, value(truth), permuted, chance, n))
    return rows


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers."""
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else float("nan")


def _ranked(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; NaN where one of both is constant."""
    x, y = rankdata(a), rankdata(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else float("nan")


def label_mixes(run: Observed) -> list[Finding]:
    """From the biases of uploaded classifiers, less their mean: how well the order of a client's
    classes follows."""
    if run.heads is None:
        return []
    change = run.heads - run.heads.mean(0)
    if not np.isfinite(change).all() or np.ptp(change) < 1e-12:
        return []
    shares = run.counts / run.counts.sum(1, keepdims=True).clip(1)

    def value(order: np.ndarray) -> float:
        return _mean([_ranked(shares[i], change[j]) for i, j in enumerate(order)])

    rng, n = np.random.default_rng(0), len(change)
    permuted = [value(rng.permutation(n)) for _ in range(DRAWS)]
    attack, measure = "label mix from the classifier's bias", "rank correlation by class"
    named = (run.method, "server: upload", attack, measure)
    return [finding(named, value(np.arange(n)), permuted, 0.0, n)]
