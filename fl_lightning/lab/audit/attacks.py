"""Attack what a *viewer* (the public, the server, another client) sees of finished runs. A row of
the result gives what a viewer learns by one attack, with an interval, beside the value by chance.

Membership attacks are the loss threshold (Yeom et al., CSF 2018) on one run, and online LiRA
(Carlini et al., S&P 2022, Algorithm 1) on runs of different seeds, in which the same sample was a
training sample or a test sample: no shadow model is trained. Each sample has a mean of its own in
LiRA's Gaussians; all share one variance, since there are few runs.

Both have two further versions, for viewers who saw models of several rounds. One uses the mean of a
sample's confidence over the stored rounds. The other uses its rise from the first to the last, in
which the first model shows how hard a sample is (difficulty calibration: Watson, Guo, Cormode,
Sablayrolles, ICLR 2022, with other models). Stronger attacks train a network: on gradients and
activations of several rounds (Nasr, Shokri, Houmansadr, S&P 2019, as a passive attacker of
federated learning), or on losses along training (Liu, Zhao, Backes, Zhang, CCS 2022). Both learn
more than from the last model alone.
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
"""Bootstrap samples of an interval, and permutations for the values by chance (ours): the ends of
95 % intervals are then known to a tenth of their width."""
CONTROL = "AUC, control: memberships shuffled"
LEVELS = {"true positives at 1 % false": 0.01, "true positives at 0.1 % false": 0.001}
FEWEST = 40
"""Ways to divide the clients into groups of the given sizes below which groups are not tested: the
true division would lie within the 95 % of permutations."""
SHUFFLES = 20
"""Shuffles of memberships for the values by chance of LiRA and the loss threshold (ours): their
spread is known to a sixth."""
FLIPPED = "trained on flipped labels (callbacks.attack): their samples are left out"
"""Note of the page about the clients of `Observed.flipped`."""
FEW = 20
"""Members, and non-members, that a client needs for an AUC of its own."""


class AttackResult(NamedTuple):
    """One row of the audit: how much a viewer learns by one attack, as the value of one measure
    (such as the AUC of a membership attack)."""

    method: str
    viewer: str
    """Key of `VIEWS`, or part of the relation that the viewer sees."""
    attack: str
    measure: str = ""
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """Ends of the 95 % bootstrap interval of `value`. For an attack on the relation: ends of the
    interval that holds 95 % of the values for permuted clients, which are values by chance. For a
    control: of the interval that holds 95 % of the values for shuffled memberships; `value` is
    their mean."""
    chance: float = 0.0
    """Value of a guess."""
    samples: int = 0
    runs: int = 1
    rounds: int = 1
    """Number of rounds whose models were used."""

    def with_value(
        self,
        measure: str,
        value: float,
        draws: Sequence[float] = (),
        **fields: Any,
    ) -> AttackResult:
        """Copy the row with a measured value.

        Args:
            measure: name of the measure.
            value: its value.
            draws: values of the measure for bootstrap samples (or for permutations or shuffles),
                whose 2.5 and 97.5 % quantiles become `low` and `high`; empty: no interval.
            fields: values of further fields.
        """
        defined = [number for number in draws if not math.isnan(number)]
        low, high = math.nan, math.nan
        if defined:
            low, high = np.percentile(defined, [2.5, 97.5]).tolist()
        return self._replace(
            measure=measure,
            value=value,
            low=low,
            high=high,
            **fields,
        )


Labelled = tuple[Array, Array, Array]
"""Client, membership and attack score of each sample; a member was a training sample."""


class Evidence(NamedTuple):
    """Confidences on which a membership attack is based."""

    suffix: str
    """End of the attack's name, such as ", mean over rounds"."""
    rounds: int
    """Number of rounds whose models give the confidences."""
    by_run: list[Confidence]


def auc(member: Array, score: Array) -> float:
    """Area under the ROC curve; NaN unless there are members and non-members."""
    count = int(member.sum())
    others = len(member) - count
    if not count or not others:
        return math.nan
    ranks = rankdata(score)  # from 1; ties get their mean
    return float((ranks[member].sum() - count * (count + 1) / 2) / (count * others))


def membership(
    method: str,
    viewer: str,
    attack: str,
    scored: Labelled,
    runs: int,
    controls: Sequence[Labelled],
    rounds: int = 1,
) -> list[AttackResult]:
    """Make the rows of a membership attack: AUC over all samples, by client and for shuffled
    memberships, and the true-positive rates at low false-positive rates.

    Args:
        method: label of the attacked method.
        viewer: viewer whose models were attacked, a key of `VIEWS`.
        attack: name of the attack.
        scored: the attack's scores.
        runs: number of runs that the attack used.
        controls: scores of the same attack after each shuffle of memberships within clients.
        rounds: number of rounds whose models the attack used.
    """
    _, member, score = scored
    rng = np.random.default_rng(0)
    size = len(member)
    samples = [rng.integers(0, size, size) for _ in range(DRAWS)]
    row = AttackResult(
        method,
        viewer,
        attack,
        chance=0.5,
        samples=size,
        runs=runs,
        rounds=rounds,
    )
    draws = [auc(member[sample], score[sample]) for sample in samples]
    shuffles = [auc(shuffled, score_of_shuffled) for _, shuffled, score_of_shuffled in controls]
    rows = [
        row.with_value("AUC", auc(member, score), draws),
        row.with_value(CONTROL, float(np.mean(shuffles)), shuffles),
    ]
    for measure, level in LEVELS.items():
        draws = [_true_positive_rate(member[sample], score[sample], level) for sample in samples]
        value = _true_positive_rate(member, score, level)
        rows.append(row.with_value(measure, value, draws, chance=level))
    return rows + _by_client(scored, row)


def shuffle(client: Array, member: Array, rng: np.random.Generator) -> Array:
    """Permute memberships within each client."""
    shuffled = member.copy()
    for number in np.unique(client):
        shuffled[client == number] = rng.permutation(member[client == number])
    return shuffled


def _true_positive_rate(member: Array, score: Array, level: float) -> float:
    """Share of members above the least threshold that at most this share of non-members exceeds."""
    others = score[~member]
    if not len(others) or not member.any():
        return math.nan
    threshold = np.sort(others)[-1 - int(level * len(others))]
    return float((score[member] > threshold).mean())


def _by_client(scored: Labelled, row: AttackResult) -> list[AttackResult]:
    """Make rows with the AUC by client: mean, worst, and means of small and of large clients."""
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
    aucs, is_small = np.array(values), np.array(sizes) <= np.median(sizes)
    mean, worst = float(np.mean(aucs)), max(values)
    rows = [
        row.with_value("AUC, mean over clients", mean, samples=len(aucs)),
        row.with_value("AUC, worst client", worst, samples=len(aucs)),
    ]
    for size, selected in (("fewer", aucs[is_small]), ("more", aucs[~is_small])):
        if len(selected):
            measure = f"AUC, clients with {size} samples"
            mean = float(np.mean(selected))
            rows.append(row.with_value(measure, mean, samples=len(selected)))
    return rows


def loss_threshold(run: Observed) -> list[AttackResult]:
    """Attack one run by loss threshold, for each viewer that sees models of all clients."""
    rows = []
    client, member = run.samples.client, run.samples.member
    rng = np.random.default_rng(1)
    shuffles = [shuffle(client, member, rng) for _ in range(SHUFFLES)]
    for suffix, rounds, [confidence] in _evidence([run]):
        for viewer in VIEWS:
            score, attack = confidence[viewer], f"loss threshold{suffix}"
            if len(score) and not np.isnan(score).any():
                scored = (client, member, score)
                controls = [(client, members, score) for members in shuffles]
                rows += membership(
                    run.method,
                    viewer,
                    attack,
                    scored,
                    1,
                    controls,
                    rounds,
                )
    return rows


def _evidence(runs: Sequence[Observed]) -> list[Evidence]:
    """List the confidences of the last round, and `over_rounds` if all runs have stored the same
    rounds."""
    rounds = runs[0].rounds
    evidence = [Evidence("", 1, [run.samples.confidence for run in runs])]
    if all(run.rounds == rounds for run in runs):
        for summary in runs[0].samples.over_rounds:
            by_run = [run.samples.over_rounds[summary] for run in runs]
            evidence.append(
                Evidence(
                    f", {summary} over rounds",
                    len(rounds),
                    by_run,
                )
            )
    return evidence


def lira(runs: Sequence[Observed]) -> list[AttackResult]:
    """Attack runs of one method with different seeds by online LiRA, for each viewer."""
    rows = []
    for suffix, rounds, by_run in _evidence(runs):
        for viewer in VIEWS:
            scores = [confidence[viewer] for confidence in by_run]
            if any(np.isnan(score).any() for score in scores):
                continue
            scored = lira_ratios(
                runs,
                scores,
                [run.samples.member for run in runs],
            )
            if len(np.unique(scored[1])) == 2:
                controls = lira_controls(runs, scores)
                attack = f"LiRA{suffix}"
                rows += membership(
                    runs[0].method, viewer, attack, scored, len(runs), controls, rounds
                )
    return rows


def lira_controls(runs: Sequence[Observed], scores: Sequence[Array]) -> list[Labelled]:
    """Repeat LiRA `SHUFFLES` times with memberships shuffled within each client of each run."""
    rng = np.random.default_rng(1)
    draws = [
        [shuffle(run.samples.client, run.samples.member, rng) for run in runs]
        for _ in range(SHUFFLES)
    ]
    return [lira_ratios(runs, scores, members) for members in draws]


def lira_ratios(
    runs: Sequence[Observed], scores: Sequence[Array], members: Sequence[Array]
) -> Labelled:
    """Compute LiRA's log likelihood ratio, log N(score; in) - log N(score; out), of each sample in
    each run.

    Samples that were members in all other runs, or in none, are left out. Clients are numbered over
    all runs.

    Args:
        runs: runs of one method.
        scores: the score of each sample, by run: the model's confidence.
        members: whether each sample was a training sample, by run.
    """
    # fewer than 10**6 clients a run
    client = np.concatenate([k * 10**6 + run.samples.client for k, run in enumerate(runs)])
    digest = np.concatenate([run.samples.digest for run in runs])
    member, score = np.concatenate(members), np.concatenate(scores)
    sample = np.unique(digest, return_inverse=True)[1]
    ratio, has_ratio = np.zeros(len(score)), np.ones(len(score), dtype=bool)
    for is_member, sign in ((True, 1), (False, -1)):
        # sums over the runs in which a sample was a member (or not), then without its own run
        counted = (member == is_member).astype(np.float64)
        count = np.bincount(sample, counted)[sample]
        total = np.bincount(sample, counted * score)[sample]
        others = count - counted
        mean = (total - counted * score) / np.maximum(others, 1)
        has_ratio &= others > 0
        # a mean that includes the value itself makes residuals too small: the root of 2 corrects
        # this for samples with two values
        repeated = (counted > 0) & (count > 1)
        spread = 1.0
        if repeated.any():
            within = score[repeated] - (total / np.maximum(count, 1))[repeated]
            spread = max(float(np.std(within)) * 2**0.5, 1e-6)
        ratio -= sign * (((score - mean) / spread) ** 2 / 2 + np.log(spread))
    return client[has_ratio], member[has_ratio], ratio[has_ratio]


# ------------------------------------------------- the relation, and clients' label distributions


def relations(run: Observed) -> list[AttackResult]:
    """Attack the last relation, layer by layer: infer how similar two clients' label distributions
    are and, if the data were divided with planted groups (groups of clients made alike on purpose),
    which clients are of the same group.

    The server sees the relation of all clients. Another client sees its own row, and its measure is
    the mean over clients.
    """
    rows: list[AttackResult] = []
    apart = ~np.eye(len(run.counts), dtype=bool)
    shares = _label_shares(run)
    alike = 1 - np.abs(shares[:, None] - shares[None]).sum(2) / 2
    same = np.equal.outer(run.groups, run.groups)
    has_groups = len(set(run.groups)) > 1 and not untestable_groups(run)
    for layer, R in run.relation.items():
        columns = [R[apart[:, j], j] for j in range(len(R))]
        # clients receive nothing from others, or all receive the same mix
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
    """Share of each class in each client's training samples, (N, C)."""
    shares: Array = run.counts / run.counts.sum(1, keepdims=True).clip(1)
    return shares


def untestable_groups(run: Observed) -> list[str]:
    """Return a note that planted groups are not tested, as a list of one line; empty if they are
    tested or absent.

    The test compares the planted groups with random divisions of the clients into groups of the
    same sizes. If fewer than `FEWEST` divisions exist, even a perfect attack would lie within the
    95 % of values by chance.
    """
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
    compare: Callable[[Array, Array], float],
    chance: float,
) -> list[AttackResult]:
    """Measure how well an attacker infers a property of pairs of clients from a layer's relation:
    the server from the whole relation, another client from its own row.

    Args:
        run: the run.
        layer: the layer, or `mean` over layers.
        truth: the property of each pair, (N, N).
        question: the attack, in words.
        measure: name of the measure.
        compare: computes the measure from true values and the weights of the same pairs.
        chance: the measure's value by chance.
    """
    R = run.relation[layer]
    apart, rng = ~np.eye(len(R), dtype=bool), np.random.default_rng(0)
    orders = [rng.permutation(len(R)) for _ in range(DRAWS)]

    def by_cube(table: Array) -> float:
        return compare(table[apart], R[apart])

    def by_row(table: Array) -> float:
        return _mean([compare(table[i, others], R[i, others]) for i, others in enumerate(apart)])

    where = "mean over layers" if layer == "mean" else f"layer {layer}"
    # fewer permutations for a client: its measure takes N times as long, and is a mean over N
    viewers = (
        ("server: relation", by_cube, DRAWS),
        ("another client: its row", by_row, DRAWS // 4),
    )
    rows = []
    for viewer, value, count in viewers:
        permuted = [value(truth[np.ix_(order, order)]) for order in orders[:count]]
        row = AttackResult(
            run.method,
            viewer,
            question,
            chance=chance,
            samples=len(R),
        )
        rows.append(row.with_value(f"{measure}, {where}", value(truth), permuted))
    return rows


def _mean(values: Sequence[float]) -> float:
    """Mean of the values other than NaN; NaN without any."""
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else math.nan


def _rank_correlation(a: Array, b: Array) -> float:
    """Spearman's rank correlation; NaN if `a` or `b` is constant."""
    x, y = rankdata(a), rankdata(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else math.nan


def label_mixes(run: Observed) -> list[AttackResult]:
    """Attack the last uploads: infer each client's label distribution from the bias of its
    classifier.

    The measure is the rank correlation, over classes, between the client's shares of labels and its
    bias minus the mean bias over clients; it is the mean over clients.
    """
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
    row = AttackResult(run.method, "server: upload", attack, samples=count)
    return [row.with_value("rank correlation by class", value(np.arange(count)), permuted)]
