"""Attacks on what was observed, as rows: what a viewer learns, with an interval, beside what chance
gives.

Membership: loss threshold (Yeom et al., CSF 2018) on one run; online LiRA (Carlini et al., S&P
2022, Algorithm 1) over runs of other seeds, in which the same sample was a training sample or a
test sample of a client: no shadow model is trained. Its Gaussians have a mean for each sample and,
since there are few runs, one variance for all.

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
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from fl_lightning.lab.audit.observe import VIEWS, Array, Confidence, Observed

DRAWS = 200
"""Bootstraps of an interval and permutations of chance (ours): intervals of 95 % to a tenth of
their width."""
CONTROL = "AUC, control: memberships shuffled"
LEVELS = {"true positives at 1 % false": 0.01, "true positives at 0.1 % false": 0.001}
FEWEST = 40
"""With fewer ways to divide the clients into groups of their sizes, the true one is within 95 % of
permutations, and a test cannot tell."""
SHUFFLES = 20
"""Of memberships, for what LiRA and thresholds give by chance (ours): their spread is known to a
sixth."""
FLIPPED = "trained on flipped labels (callbacks.attack): their samples are left out"
"""What the page says of some clients (`Observed.flipped`)."""
FEW = 20
"""Members and others that a client must have for an AUC of its own."""


class AttackResult(NamedTuple):
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


def nothing_yet(method: str, viewer: str, attack: str, chance: float, samples: int) -> AttackResult:
    """A finding without a value, for `found`."""
    return AttackResult(
        method,
        viewer,
        attack,
        "",
        math.nan,
        math.nan,
        math.nan,
        chance,
        samples,
    )


def found(
    like: AttackResult, measure: str, value: float, drawn: Sequence[float] = (), **fields: Any
) -> AttackResult:
    """A finding `like` another, with a value of its own; its interval holds 95 % of the `drawn`
    values. `fields`: others that differ."""
    defined = [number for number in drawn if not math.isnan(number)]
    low, high = np.percentile(defined, [2.5, 97.5]).tolist() if defined else (math.nan, math.nan)
    return like._replace(
        measure=measure,
        value=value,
        low=low,
        high=high,
        **fields,
    )


Labelled = tuple[Array, Array, Array]
"""Client, member and score of each sample."""


class Evidence(NamedTuple):
    """Confidences that an attacker goes by."""

    suffix: str
    """Of the attack's name."""
    rounds: int
    """Number of rounds whose models give them."""
    by_run: list[Confidence]


def auc(member: Array, score: Array) -> float:
    """Area under the ROC curve; NaN unless there are members and others."""
    count = int(member.sum())
    others = len(member) - count
    if not count or not others:
        return math.nan
    ranks = rankdata(score)  # from 1; equal scores share theirs
    return float((ranks[member].sum() - count * (count + 1) / 2) / (count * others))


def membership(
    method: str,
    view: str,
    attack: str,
    scored: Labelled,
    runs: int,
    controls: Sequence[Labelled],
    rounds: int = 1,
) -> list[AttackResult]:
    """AUC over all clients and for single ones, true positives at low false ones, and the control.

    `controls`: the same attack on memberships that were shuffled within each client, once each.
    """
    _, member, score = scored
    rng = np.random.default_rng(0)
    size = len(member)
    draws = [rng.integers(0, size, size) for _ in range(DRAWS)]
    like = nothing_yet(method, view, attack, 0.5, size)._replace(runs=runs, rounds=rounds)
    drawn = [auc(member[draw], score[draw]) for draw in draws]
    shuffled = [auc(mixed, score_of_mixed) for _, mixed, score_of_mixed in controls]
    rows = [
        found(like, "AUC", auc(member, score), drawn),
        found(like, CONTROL, float(np.mean(shuffled)), shuffled),
    ]
    for words, level in LEVELS.items():
        drawn = [_true_positives(member[draw], score[draw], level) for draw in draws]
        value = _true_positives(member, score, level)
        rows.append(found(like, words, value, drawn, chance=level))
    return rows + _by_client(scored, like)


def shuffle(client: Array, member: Array, rng: np.random.Generator) -> Array:
    """Memberships permuted within each client (and so as many members as before)."""
    mixed = member.copy()
    for number in np.unique(client):
        mixed[client == number] = rng.permutation(member[client == number])
    return mixed


def _true_positives(member: Array, score: Array, level: float) -> float:
    """The share of members above the least threshold that at most `level` of the others exceed."""
    others = score[~member]
    if not len(others) or not member.any():
        return math.nan
    threshold = np.sort(others)[-1 - int(level * len(others))]
    return float((score[member] > threshold).mean())


def _by_client(scored: Labelled, like: AttackResult) -> list[AttackResult]:
    """The worst client, and small against large ones."""
    client, member, score = scored
    values, sizes = [], []
    for number in np.unique(client):
        of_client = client == number
        members = int(member[of_client].sum())
        if min(members, of_client.sum() - members) >= FEW:
            values.append(auc(member[of_client], score[of_client]))
            sizes.append(members)
    if not values:
        return []
    every, is_small = np.array(values), np.array(sizes) <= np.median(sizes)
    mean, worst = float(np.mean(every)), max(values)
    rows = [
        found(like, "AUC, mean over clients", mean, samples=len(every)),
        found(like, "AUC, worst client", worst, samples=len(every)),
    ]
    for words, some in (("fewer", every[is_small]), ("more", every[~is_small])):
        if len(some):
            measure = f"AUC, clients with {words} samples"
            rows.append(
                found(
                    like,
                    measure,
                    float(np.mean(some)),
                    samples=len(some),
                )
            )
    return rows


def thresholds(run: Observed) -> list[AttackResult]:
    """Loss threshold on one run, in the eyes of each viewer that sees a model."""
    rows = []
    client, member = run.samples.client, run.samples.member
    rng = np.random.default_rng(1)
    mixed = [shuffle(client, member, rng) for _ in range(SHUFFLES)]
    for suffix, rounds, [confidence] in _evidence([run]):
        for view in VIEWS:
            score, attack = confidence[view], f"loss threshold{suffix}"
            if len(score) and not np.isnan(score).any():
                scored = (client, member, score)
                controls = [(client, members, score) for members in mixed]
                rows += membership(
                    run.method,
                    view,
                    attack,
                    scored,
                    1,
                    controls,
                    rounds,
                )
    return rows


def _evidence(runs: Sequence[Observed]) -> list[Evidence]:
    """Confidences of the last round; where all of the runs have kept the same further rounds, also
    each of `over_rounds`."""
    rounds = runs[0].rounds
    evidence = [Evidence("", 1, [run.samples.confidence for run in runs])]
    if all(run.rounds == rounds for run in runs):
        for way in runs[0].samples.over_rounds:
            by_run = [run.samples.over_rounds[way] for run in runs]
            evidence.append(
                Evidence(
                    f", {way} over rounds",
                    len(rounds),
                    by_run,
                )
            )
    return evidence


def lira(runs: Sequence[Observed]) -> list[AttackResult]:
    """Online LiRA over runs of one method that differ by their seed."""
    rows = []
    for suffix, rounds, by_run in _evidence(runs):
        for view in VIEWS:
            scores = [confidence[view] for confidence in by_run]
            if any(np.isnan(score).any() for score in scores):
                continue
            scored = lira_ratios(
                runs,
                scores,
                [run.samples.member for run in runs],
            )
            if len(np.unique(scored[1])) == 2:
                controls = by_chance(runs, scores)
                attack = f"LiRA{suffix}"
                rows += membership(
                    runs[0].method, view, attack, scored, len(runs), controls, rounds
                )
    return rows


def by_chance(runs: Sequence[Observed], scores: Sequence[Array]) -> list[Labelled]:
    """LiRA on memberships that were shuffled within each client of each run, `SHUFFLES` times."""
    rng = np.random.default_rng(1)
    draws = [
        [shuffle(run.samples.client, run.samples.member, rng) for run in runs]
        for _ in range(SHUFFLES)
    ]
    return [lira_ratios(runs, scores, members) for members in draws]


def lira_ratios(
    runs: Sequence[Observed], scores: Sequence[Array], members: Sequence[Array]
) -> Labelled:
    """LiRA's log likelihood ratios, log N(score; in) - log N(score; out), of the samples that have
    one.

    A sample has one in a run where among the other runs it was trained on in some, and only tested
    on in others. Clients of different runs get different numbers.
    """
    # the same number in another run is another client (fewer than 10**6 clients a run)
    client = np.concatenate([k * 10**6 + run.samples.client for k, run in enumerate(runs)])
    digest = np.concatenate([run.samples.digest for run in runs])
    member, score = np.concatenate(members), np.concatenate(scores)
    sample = np.unique(digest, return_inverse=True)[1]
    ratio, has_ratio = np.zeros(len(score)), np.ones(len(score), dtype=bool)
    for is_member, sign in ((True, 1), (False, -1)):
        # sums over the runs in which a sample was a member (or was none), then without its own run
        counted = (member == is_member).astype(np.float64)
        count = np.bincount(sample, counted)[sample]
        total = np.bincount(sample, counted * score)[sample]
        others = count - counted
        mean = (total - counted * score) / np.maximum(others, 1)
        has_ratio &= others > 0
        # residuals from a mean that includes the value itself are too small; the root of 2
        # corrects samples with two values
        repeated = (counted > 0) & (count > 1)
        spread = 1.0
        if repeated.any():
            within = score[repeated] - (total / np.maximum(count, 1))[repeated]
            spread = max(float(np.std(within)) * 2**0.5, 1e-6)
        ratio -= sign * (((score - mean) / spread) ** 2 / 2 + np.log(spread))
    return client[has_ratio], member[has_ratio], ratio[has_ratio]


# ---------------------------------------------------------------- the relation, and label mixes


def relations(run: Observed) -> list[AttackResult]:
    """From the relation, by layer: who shares a group, and how alike two clients' label mixes are.

    The server sees the whole cube, another client its own row: its measure is the mean over
    clients.
    """
    rows: list[AttackResult] = []
    apart = ~np.eye(len(run.counts), dtype=bool)
    shares = _label_shares(run)
    alike = 1 - np.abs(shares[:, None] - shares[None]).sum(2) / 2
    same = np.equal.outer(run.groups, run.groups)
    has_groups = len(set(run.groups)) > 1 and not untestable_groups(run)
    for layer, R in run.relation.items():
        columns = [R[apart[:, j], j] for j in range(len(R))]
        # nobody's, or one row for all: sample counts
        if not R[apart].any() or max(map(np.ptp, columns)) < 1e-6:
            continue
        if has_groups:
            rows += _related(
                run,
                layer,
                same,
                "who shares a group",
                "AUC",
                auc,
                0.5,
            )
        question, measure = "how alike label mixes are", "rank correlation"
        rows += _related(
            run,
            layer,
            alike,
            question,
            measure,
            _rank_correlation,
            0.0,
        )
    return rows


def _label_shares(run: Observed) -> Array:
    """The share of each class in each client's training samples, (N, C)."""
    shares: Array = run.counts / run.counts.sum(1, keepdims=True).clip(1)
    return shares


def untestable_groups(run: Observed) -> list[str]:
    """A note if clients can be divided into groups of their sizes in fewer than `FEWEST` ways: then
    groups are not tested."""
    sizes = sorted(Counter(run.groups).values())
    if not run.relation or len(sizes) < 2:
        return []
    ways = math.factorial(len(run.groups))
    for size, times in Counter(sizes).items():
        ways //= math.factorial(size) ** times * math.factorial(times)
    if ways >= FEWEST:
        return []
    return [
        f"{len(run.groups)} clients in groups of {', '.join(map(str, sizes))} can be divided in "
        f"{ways} ways only: whether the relation tells who shares a group is not tested"
    ]


def _related(
    run: Observed,
    layer: str,
    truth: Array,
    question: str,
    measure: str,
    of: Callable[[Array, Array], float],
    chance: float,
) -> list[AttackResult]:
    """How well a layer's relation follows `truth` (N, N): for the server, and for another
    client."""
    R = run.relation[layer]
    apart, rng = ~np.eye(len(R), dtype=bool), np.random.default_rng(0)
    orders = [rng.permutation(len(R)) for _ in range(DRAWS)]

    def by_cube(table: Array) -> float:
        return of(table[apart], R[apart])

    def by_row(table: Array) -> float:
        return _mean([of(table[i, others], R[i, others]) for i, others in enumerate(apart)])

    where = "mean over layers" if layer == "mean" else f"layer {layer}"
    # a client's measure is N times as dear, and a mean over N: fewer permutations do
    viewers = (
        ("server: relation", by_cube, DRAWS),
        ("another client: its row", by_row, DRAWS // 4),
    )
    rows = []
    for viewer, value, draws in viewers:
        permuted = [value(truth[np.ix_(order, order)]) for order in orders[:draws]]
        like = nothing_yet(run.method, viewer, question, chance, len(R))
        rows.append(
            found(
                like,
                f"{measure}, {where}",
                value(truth),
                permuted,
            )
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers."""
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else math.nan


def _rank_correlation(a: Array, b: Array) -> float:
    """Spearman's; NaN where one of both is constant."""
    x, y = rankdata(a), rankdata(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else math.nan


def label_mixes(run: Observed) -> list[AttackResult]:
    """From the biases of uploaded classifiers, less their mean: how well the order of a client's
    classes follows."""
    if run.heads is None:
        return []
    change = run.heads - run.heads.mean(0)
    if not np.isfinite(change).all() or np.ptp(change) < 1e-12:
        return []
    shares, count = _label_shares(run), len(change)

    def value(order: Array) -> float:
        return _mean([_rank_correlation(shares[i], change[j]) for i, j in enumerate(order)])

    rng = np.random.default_rng(0)
    permuted = [value(rng.permutation(count)) for _ in range(DRAWS)]
    attack = "label mix from the classifier's bias"
    like = nothing_yet(run.method, "server: upload", attack, 0.0, count)
    return [
        found(
            like,
            "rank correlation by class",
            value(np.arange(count)),
            permuted,
        )
    ]
