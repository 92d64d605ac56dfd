"""A relation that groups clients in the last or first layers, if a trial on held-out losses shows
that groups help.

Rounds 1 to 3 are FedAvg's: all clients begin from one model, so the cosines of their steps can be
compared. If the cosines fall into two clusters far apart, pairs of the upper cluster are of one
group, and rounds 4 to 6 try three candidates: FedAvg's rows in all layers (EVERYWHERE, 0), the
group's in the last layer (HEAD, 1), or in the first (FIRST, 2). In round t client i begins from
candidate (i + t) mod 3, a Latin square, without its own model in the mix, and reports its loss
before and after training on two halves of its samples, each sample scored by the model of the other
half. The candidate that wins over all clients stays. If none does, three rounds more try the last
two layers and the first two, then four and so on, up to half of the layers: candidates 3 and 4 are
the last two and the first two. If no candidate wins, FedAvg's rows stay.

Steps alone cannot tell label skew, where groups cost accuracy, from conflict, where they gain.
Losses after training can, and so can means of features by class, if all clients share classes: if
their distances fall into two clusters, pairs that agree and pairs whose classes look different,
clients conflict, and the trial only decides in which layer.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_lightning.callbacks.base import internal
from fl_lightning.callbacks.measured import add_noise_ratio, noise_shares
from fl_lightning.callbacks.relations import Relation
from fl_lightning.callbacks.selection import LayerSelection
from fl_lightning.core import Payload, RelationInputs, RunContext, Server, Tensors
from fl_lightning.core.relation import Weights
from fl_lightning.foundation import log

COMPARED = 3
"""Number of rounds whose steps are compared. After 3, 12 of 12 seeds had the planted groups (ours,
validation data)."""
TRIED = 3
"""Number of rounds of a trial: in each, a third of the clients tries each candidate, and in the end
every client has tried every one."""
LAST = COMPARED + TRIED
"""The last round of the first trial; the run must have more."""
FEWEST = 4
"""The least number of clients that can be grouped: fewer make three pairs at most, too few to be
split (ours)."""
CLEAR, CLEARER = 2.0, 3.0
"""z-scores by which a candidate must be better. CLEAR: than FedAvg's rows, some 95 %. CLEARER: the
first layer than the last, since it has more numbers, and of candidates alike in validation loss the
smaller one does less harm (ours)."""
APART = 2.0
"""Ratio above which class means conflict: their squared distance over the distance that noise of
few samples explains, mean over the pairs of the farther cluster. Without conflict it was 0.9 to 1.7
in 29 runs, with groups of labels or rotations 2.1 to 13 in 61 of 65 (ours, validation data)."""
ROUNDING = 1e-6
"""Gaps of cosines, and gains relative to the mean loss, up to which 32-bit rounding explains
them."""
MOST_NAMED = 50
"""The greatest number of clients that a line about groups names."""

TRIAL = "trial"
"""The key of a download that asks a client to report losses."""
EVERYWHERE, HEAD, FIRST = range(3)
"""The candidates of the first trial; in each further trial HEAD and FIRST are 2 higher."""
COLLECTS, TRIES, SETTLED = range(3)
"""The stages: steps are collected, candidates are tried, groups are decided."""
ROUND, STAGE, CHOICE, BEGUN = range(4)
"""Places in `cross.state`: the last round, the stage, the chosen candidate (in a trial the number
of grouped candidates that earlier trials tried), the last round before the trial."""
EVIDENCE = ("separation", "z_last", "z_first", "z_first_over_last")
"""Names of the columns `groups_NAME` of metrics.csv: the separation d' of the cosines' two
clusters, and the trial's z-scores (last layers over FedAvg, first over FedAvg, first over last)."""


# ---------------------------------------------------------------- groups and their trial


def split(values: Tensor) -> tuple[float, float]:
    """Return Otsu's threshold between two clusters of `values` (k,), and d': the distance of the
    clusters' means over the standard deviation within clusters.

    (Otsu, IEEE Transactions on Systems, Man and Cybernetics 1979.) d' is 0 if values are equal up
    to rounding.
    """
    ordered = values.double().sort().values
    n = len(ordered)
    below = torch.arange(1, n, dtype=torch.float64)
    sums = ordered.cumsum(0)[:-1]
    gaps = (ordered.sum() - sums) / (n - below) - sums / below
    between = below * (n - below) * gaps.square() * (ordered[1:] > ordered[:-1])
    if n < 2 or float(between.max()) <= 0:
        return math.inf, 0.0
    count = int(between.argmax()) + 1
    low = ordered[:count]
    high = ordered[count:]
    gap = float(high.mean() - low.mean())
    if gap < ROUNDING:
        return math.inf, 0.0
    within = ((low - low.mean()).square().sum() + (high - high.mean()).square().sum()) / n
    threshold = float(low[-1] + high[0]) / 2
    return threshold, gap / max(float(within.sqrt()), ROUNDING)


def class_gaps(tables: Tensor) -> Tensor:
    """Return how far the clients' class means lie apart, (n, n), as a mean over the classes that
    both clients have. 1: as far as the noise of finitely many samples explains.

    A distance is the squared distance of two class means, divided by the expectation of this
    squared distance between clients that differ by noise alone.

    Args:
        tables: (n, C, 2 + d): for each class the number of samples, the sum of their squared
            distances from their mean, and that mean.

    Returns:
        Shape (n, n); not finite where two clients share no class, or no class has two samples.
    """
    counts, squares, means = tables.double().split([1, 1, tables.shape[-1] - 2], -1)
    variance = squares.sum() / (counts - 1).clamp_min(0).sum()
    gaps = torch.zeros(len(tables), len(tables), dtype=torch.float64)
    shared = torch.zeros_like(gaps)
    for n, mean in zip(counts.unbind(1), means.unbind(1), strict=True):
        weights = n * n.T / (n + n.T).clamp_min(1)
        gaps += weights * torch.cdist(mean, mean).square()
        shared += weights > 0
    return gaps / shared / variance


def client_groups(near: Tensor) -> list[list[int]]:
    """Return the groups of clients, each in ascending order: the connected components of a graph.

    Two clients are connected if more than half of the clients that are near to one of them are near
    to both (each is near to itself). So one wrong pair joins no two groups.

    Args:
        near: (N, N), true for pairs of clients that are near each other.
    """
    from scipy.sparse.csgraph import connected_components

    rows = near.double().fill_diagonal_(1)
    common = rows @ rows.T
    sizes = rows.sum(1)
    either = sizes[:, None] + sizes - common
    count, labels = connected_components((2 * common > either).numpy(), directed=False)
    return [np.flatnonzero(labels == group).tolist() for group in range(count)]


def candidates(clients: Tensor, t: int | Tensor) -> Tensor:
    """Return the candidate (0, 1 or 2, see above) that each client tries, (k,).

    Args:
        clients: numbers of k clients, (k,).
        t: the round, or a round for each client, (k,).
    """
    return (clients + t) % 3


def gains(losses: Tensor, begun: int) -> dict[tuple[int, int], float]:
    """Estimate by how much each candidate lowers the mean loss in comparison with each candidate of
    a lower number; return z-scores (gain over standard error).

    Least squares: loss = client + round + candidate + error, with equal errors.

    Args:
        losses: each client's loss in each round of the trial, (TRIED, N); infinite: not measured.
        begun: the last round before the trial.

    Returns:
        By (candidate, candidate of a lower number), positive if the former has the lower loss;
            empty if there are too few losses.
    """
    rounds, clients = losses.isfinite().nonzero(as_tuple=True)
    y = losses[rounds, clients]
    tried = candidates(clients, begun + 1 + rounds)
    of_clients = one_hot(clients, losses.shape[1])
    of_rounds = one_hot(rounds, TRIED)[:, 1:]
    of_candidates = one_hot(tried, 3)[:, 1:]
    X = torch.cat([of_clients, of_rounds, of_candidates], 1).double()
    X = X[:, X.any(0)]
    free = len(y) - X.shape[1]
    if len(set(tried.tolist())) < 3 or free < 1 or int(torch.linalg.matrix_rank(X)) < X.shape[1]:
        return {}
    inverse = torch.linalg.inv(X.T @ X)
    effects = inverse @ (X.T @ y)
    variance = (y - X @ effects).square().sum() / free
    contrasts = {
        (HEAD, EVERYWHERE): (-1.0, 0.0),
        (FIRST, EVERYWHERE): (0.0, -1.0),
        (FIRST, HEAD): (1.0, -1.0),
    }
    least = ROUNDING * float(y.abs().mean())
    scores: dict[tuple[int, int], float] = {}
    for pair, weights in contrasts.items():
        contrast = torch.tensor(weights, dtype=torch.float64)
        error = float((variance * (contrast @ inverse[-2:, -2:] @ contrast)).sqrt())
        scores[pair] = float(contrast @ effects[-2:]) / max(error, least, 1e-30)
    return scores


@dataclass
class CrossFittedCube(Relation):
    """Mixes like FedAvg; if a trial shows that groups of clients do better, mixes within these
    groups in the layers that won (the last or the first ones), like FedAvg in all others.

    Args:
        guard: least separation d' (see `split`) of the two clusters of cosines at which groups are
            tried.
    """

    per_layer = True
    sources = "known"
    fixed = "its groups are found from steps that begin from one model"

    guard: float
    _layers: dict[int, list[int]] = internal(default_factory=dict)
    """The layers that each candidate groups."""
    _measured: dict[str, float] = internal(default_factory=dict)
    """Metrics of the last round."""

    def on_fit_start(self, run: RunContext) -> None:
        """Find the layers of each candidate: the last and the first 1, 2, 4 ... layers, up to
        half."""
        head = set[int]()
        body = set[int]()
        for block in run.groups[0].layout.blocks:
            if block.kind == "parameter":
                (head if block.head else body).add(block.layer)
        rest = sorted(body - head)
        self._layers = {HEAD: sorted(head), FIRST: rest[:1]}
        count = 2
        while 2 * count <= len(rest) + 1:
            tried = len(self._layers)
            self._layers[tried + HEAD] = [*rest[1 - count :], *sorted(head)]
            self._layers[tried + FIRST] = rest[:count]
            count *= 2

    def init_server(self, run: RunContext) -> Tensors:
        """Return the relation's tensors on the server. Infinite: not measured yet.

        - `cross.noise` (2, L): the sums and counts that `add_noise_ratio` updates.
        - `cross.averaged` (N,): 1 for clients whose uploads are in FedAvg's current model.
        - `cross.told` (N,): 1 for clients that have received the share of noise in their steps.
        - `cross.cosines` (2, N, N): sums of the cosines between two clients' steps, and their
          numbers.
        - `cross.near` (N, N): 1 for two clients of the same group.
        - `cross.losses` (2, TRIED, N): held-out losses in the trial, before and after training.
        - `cross.gaps` (N, N): the result of `class_gaps`.
        - `cross.state` (4,): last round, stage, choice, last round before the trial.
        - `cross.evidence` (4,): the values named by `EVIDENCE`.
        """
        n = run.clients
        return {
            "cross.noise": torch.zeros(2, len(run.layer_names), dtype=torch.float64),
            "cross.averaged": torch.zeros(n, dtype=torch.int64),
            "cross.told": torch.zeros(n, dtype=torch.int64),
            "cross.cosines": torch.zeros(2, n, n, dtype=torch.float64),
            "cross.near": torch.zeros(n, n, dtype=torch.int64),
            "cross.gaps": torch.full((n, n), math.inf, dtype=torch.float64),
            "cross.losses": torch.full((2, TRIED, n), math.inf, dtype=torch.float64),
            "cross.state": torch.tensor([0, COLLECTS, EVERYWHERE, 0]),
            "cross.evidence": torch.full((len(EVIDENCE),), math.inf, dtype=torch.float64),
        }

    # ---------------------------------------------------------------- downloads

    def sent(self, server: Server) -> dict[int, Payload]:
        """Return each client's download: the client's own mix during a trial and after groups have
        won; FedAvg's model otherwise.

        After the first round and until the client has answered, the download also holds `share`
        (L,), the share of noise in the client's step, by which the client shortens its steps.
        During a trial it holds `trial` (), which asks the client for its held-out losses.
        """
        memory = server.memory
        _, stage, choice, _ = memory["cross.state"].tolist()
        own_mixes = stage == TRIES or choice != EVERYWHERE
        payloads = server.only.mix_by(self) if own_mixes else self._one_for_all(server)
        for c, payload in payloads.items():
            if server.run.server.uploaded and not memory["cross.told"][c]:
                sums, count = memory["cross.noise"]
                shares = noise_shares(sums, count, server.samples([c])[:, None])
                payload.statistics["share"] = shares[0].float()
            if stage == TRIES:
                payload.statistics[TRIAL] = torch.ones(())
        return payloads

    def _one_for_all(self, server: Server) -> dict[int, Payload]:
        """Return FedAvg's model for every client: one vector, so that all begin with the same
        bits."""
        group = server.only
        cohort = server.cohort
        averaged = server.memory["cross.averaged"].nonzero()[:, 0].tolist() or cohort
        row = server.shares(averaged)
        rows = row.expand(1, len(cohort), -1)
        group.weighed = Weights(group.group, rows, list(cohort), averaged)
        payloads = group.send(dict.fromkeys(group.here, group["model"]))
        own_weights = dict(zip(averaged, row.tolist(), strict=True))
        layers = len(group.layout.layers)
        for c, payload in payloads.items():
            payload.own_weights = np.full(layers, own_weights.get(c, 0.0), np.float32)
        return payloads

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (L, m, n)."""
        memory = inputs.memory
        places = inputs.places
        t, stage, choice, _ = memory["cross.state"].tolist()
        sources = torch.tensor(inputs.sources)
        receivers = torch.tensor(inputs.receivers)
        identity = torch.eye(len(sources), dtype=torch.float64)
        near = memory["cross.near"][sources][:, sources].double().maximum(identity)[places]
        identity = identity[places]
        everybody = inputs.samples.expand_as(near)
        chosen = torch.full_like(receivers, choice)
        if stage == TRIES:
            everybody = _some(everybody * (1 - identity), identity)
            chosen = candidates(receivers, t + 1)
            chosen += choice * (chosen != EVERYWHERE)
        grouped = _some(near * everybody, everybody)
        rows = everybody.expand(inputs.layers, -1, -1).clone()
        for grouping, layers in self._layers.items():
            picked = (chosen == grouping).nonzero()[:, 0]
            for layer in layers:
                rows[layer, picked] = grouped[picked]
        return rows / rows.sum(-1, keepdim=True)

    # ---------------------------------------------------------------- learning from uploads

    def learn(self, server: Server) -> None:
        """Update noise, cosines and losses from a round's uploads, and decide about groups."""
        state = server.memory["cross.state"]
        t = server.round
        first = int(state[ROUND]) == 0
        state[ROUND] = t
        server.memory["cross.averaged"].zero_()[server.answered] = 1
        self._learn_noise(server, first)
        if t <= COMPARED:
            self._compare(server)
        if t == COMPARED:
            self._compare_classes(server)
        if first and (why := self._why_no_groups(server.run, COMPARED)):
            _say(server.run, f"{why}: no groups are looked for, all receive FedAvg's model")
        stage = int(state[STAGE])
        if stage == TRIES:
            self._keep_losses(server)
        elif stage == COLLECTS and t >= COMPARED:
            self._find_groups(server)
        self._record(server)

    def _learn_noise(
        self,
        server: Server,
        first: bool,
    ) -> None:
        memory = server.memory
        if not first:
            memory["cross.told"][server.answered] = 1
        measured = [c for c in server.answered if "noise" in server.statistics[c]]
        sums, count = memory["cross.noise"]
        for c, n in zip(measured, server.samples(measured), strict=True):
            upload = server.statistics[c]
            add_noise_ratio(
                sums,
                count,
                n,
                upload["step"].double(),
                upload["noise"],
            )
        if first and not measured:
            problem = "no client has enough samples to measure its noise"
            _say(server.run, f"{problem}: all of a step counts as noise")

    def _compare(self, server: Server) -> None:
        """Add the cosines of the answering clients' steps, which all began from one model."""
        clients = torch.tensor(server.answered)
        group = server.only
        gram = group.gram(server.answered, group.layout.is_parameter, "sent")
        products = gram.full[0]
        lengths = products.diagonal().clamp_min(1e-300).sqrt()
        sums, count = server.memory["cross.cosines"]
        pairs = clients[:, None], clients
        sums[pairs] += products / lengths[:, None] / lengths
        count[pairs] += 1

    def _compare_classes(self, server: Server) -> None:
        """Store the distances of the class means of the clients that uploaded theirs."""
        clients = [c for c in server.answered if "classes" in server.statistics[c]]
        if clients:
            index = torch.tensor(clients)
            tables = torch.stack([server.statistics[c]["classes"] for c in clients])
            server.memory["cross.gaps"][index[:, None], index] = class_gaps(tables)

    def _conflict(self, memory: Tensors) -> tuple[Tensor, float]:
        """Return which pairs of clients have similar class means, bool (N, N), and the separation
        d' of similar and different pairs; 0: no conflict."""
        gaps = memory["cross.gaps"]
        upper = torch.ones_like(gaps, dtype=torch.bool).triu(1)
        if not gaps[upper].isfinite().all():
            return gaps < APART, 0.0
        closeness = -gaps.clamp_min(ROUNDING).log()
        threshold, distance = split(closeness[upper])
        near = closeness > threshold
        apart = math.exp(-float(closeness[upper & ~near].mean()))
        conflict = distance > self.guard and apart > APART
        return near, distance if conflict else 0.0

    def _why_no_groups(
        self,
        run: RunContext,
        t: int,
    ) -> str:
        """Return why groups cannot be tried after round t, in words; empty: they can."""
        if run.clients < FEWEST:
            return f"{run.clients} clients, fewer than {FEWEST}"
        if not all(self._layers.values()):
            return "the model has one layer"
        if any(isinstance(callback, LayerSelection) for callback in run.callbacks):
            return "layerselection withholds layers, so clients do not begin from one model"
        if run.rounds <= t + TRIED:
            return f"{run.rounds} rounds, where the first {LAST} would find groups"
        return ""

    def _find_groups(self, server: Server) -> None:
        """Find the groups from the compared steps or class means; begin a trial if they are far
        enough apart."""
        memory = server.memory
        run = server.run
        state = memory["cross.state"]
        if self._why_no_groups(run, server.round):  # a resumed run may have more rounds
            return
        state[STAGE] = SETTLED
        sums, count = memory["cross.cosines"]
        upper = torch.ones(run.clients, run.clients, dtype=torch.bool).triu(1)
        if not count[upper].all():
            reason = f"some clients were never in one of the rounds 1 to {COMPARED} together"
            return _say(run, f"{reason}: no groups are looked for, all receive FedAvg's model")
        cosines = sums / count.clamp_min(1)
        threshold, distance = split(cosines[upper])
        near = cosines > threshold
        compared = "steps"
        agree, conflict = self._conflict(memory)
        if conflict > distance:
            near = agree
            distance = conflict
            compared = "class means"
        memory["cross.evidence"][0] = min(distance, 1 / ROUNDING)
        if distance <= self.guard:
            reason = f"clients' steps do not fall into groups (d' {distance:.1f}"
            return _say(run, f"{reason}, not above {self.guard:g}): all receive FedAvg's model")
        near = near.long()
        memory["cross.near"] = near
        state[STAGE] = TRIES
        state[BEGUN] = server.round
        reason = f"clients' {compared} fall into groups (d' {distance:.1f}), {_named(run, near)}"
        _say(run, f"{reason}; {_trial(server.round, 1)}")

    def _keep_losses(self, server: Server) -> None:
        """Store the losses of a round of the trial; after its last round decide."""
        tried = server.round - int(server.memory["cross.state"][BEGUN])
        for c, upload in server.statistics.items():
            if "losses" in upload:
                server.memory["cross.losses"][:, tried - 1, c] = upload["losses"].double()
        if tried == TRIED:
            self._choose(server)

    def _choose(self, server: Server) -> None:
        """Decide a finished trial by z-scores over all clients (`CLEAR`, `CLEARER`): group in the
        last or first layers, try more layers, or keep FedAvg's rows."""
        memory = server.memory
        run = server.run
        before, after = memory["cross.losses"]
        state = memory["cross.state"]
        begun = int(state[BEGUN])
        trained = gains(after, begun)
        z_last = trained.get((HEAD, EVERYWHERE), 0.0)
        z_first = trained.get((FIRST, EVERYWHERE), 0.0)
        z_over = gains((before + after) / 2, begun).get((FIRST, HEAD), 0.0)
        memory["cross.evidence"][1:] = torch.tensor([z_last, z_first, z_over], dtype=torch.float64)
        state[STAGE] = SETTLED
        tried = int(state[CHOICE])
        ends = 2 ** (tried // 2)
        places = {HEAD: _end("last", ends), FIRST: _end("first", ends)}
        z = f"z {z_last:.1f} in {places[HEAD]}, {z_first:.1f} in {places[FIRST]}"
        scores = f"({z}, {z_over:.1f} of the first over the last)"
        winner = EVERYWHERE
        if z_first > CLEAR and z_over > CLEARER:
            winner = FIRST
        elif z_last > CLEAR:
            winner = HEAD
        has_further = tried + FIRST + HEAD in self._layers and run.rounds > server.round + TRIED
        _, conflict = self._conflict(memory)
        if conflict and winner == EVERYWHERE and not has_further:
            winner = FIRST if z_over > CLEARER else HEAD
        if winner != EVERYWHERE:
            state[CHOICE] = tried + winner
            groups = _named(run, memory["cross.near"])
            return _say(run, f"grouped in {places[winner]} {scores}: {groups}")
        reason = f"held-out losses do not ask for groups {scores}"
        if has_further:
            state[STAGE] = TRIES
            state[CHOICE] = tried + FIRST
            state[BEGUN] = server.round
            memory["cross.losses"].fill_(math.inf)
            return _say(run, f"{reason}; {_trial(server.round, 2 * ends)}")
        state[CHOICE] = EVERYWHERE
        _say(run, f"{reason}: all receive FedAvg's model")

    # ---------------------------------------------------------------- metrics and summary

    def _record(self, server: Server) -> None:
        memory = server.memory
        run = server.run
        samples = server.samples(server.answered)[:, None]
        sums, count = memory["cross.noise"]
        shares = noise_shares(sums, count, samples).mean(0).tolist()
        self._measured = {}
        for name, share in zip(run.layer_names, shares, strict=True):
            self._measured[f"noise_share_{name}"] = share
        for name, value in zip(EVIDENCE, memory["cross.evidence"].tolist(), strict=True):
            if math.isfinite(value):
                self._measured[f"groups_{name}"] = value

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return metrics of the round: `noise_share_LAYER`, the share of noise in a client's step
        (mean over the round's clients); and, once measured, the separation of the cosines' clusters
        and the z-scores of the trial, `groups_NAME` for each NAME in `EVIDENCE`."""
        return self._measured

    def chosen(self, run: RunContext) -> dict[str, Any]:
        """Return entries for the summary: `grouped_layers` and, if there are any, `client_groups`,
        lists of client numbers."""
        memory = run.server.memory
        _, stage, choice, _ = memory["cross.state"].tolist()
        grouped = [] if stage == TRIES else self._layers.get(choice, [])
        layers = [run.layer_names[k] for k in grouped]
        summary: dict[str, Any] = {"grouped_layers": layers}
        if layers:
            summary["client_groups"] = client_groups(memory["cross.near"])
        return summary


def _some(rows: Tensor, otherwise: Tensor) -> Tensor:
    """Return `rows`, with the same rows of `otherwise` in place of rows whose weights are all
    0."""
    return torch.where(rows.sum(-1, keepdim=True) > 0, rows, otherwise)


def _end(end: str, count: int) -> str:
    """Return words for the `count` layers at an end: `the last layer`, `the first 2 layers`."""
    return f"the {end} layer" if count == 1 else f"the {end} {count} layers"


def _trial(t: int, count: int) -> str:
    """Return words for a trial after round t."""
    first = _end("first", count).removesuffix(" layer").removesuffix(" layers")
    return f"rounds {t + 1} to {t + TRIED} try them in {_end('last', count)}, and in {first}"


def _named(run: RunContext, near: Tensor) -> str:
    """Return groups in words: `0, 2 | 1, 3`."""
    groups = client_groups(near)
    names = [*run.data.client_names, *range(len(run.data.client_names), run.clients)]
    if run.clients > MOST_NAMED:
        sizes = ", ".join(str(len(group)) for group in groups[:MOST_NAMED])
        return f"{len(groups)} of {sizes} clients"
    return " | ".join(", ".join(f"{names[c]}" for c in group) for group in groups)


def _say(run: RunContext, line: str) -> None:
    if run.is_main:
        log.say(f"{run.method_name}: {line}")
