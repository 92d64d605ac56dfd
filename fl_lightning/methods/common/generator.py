"""A generator of features by class, kept as one flat tensor (FedGen): two linear layers with a ReLU
between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy, kl_div, linear, log_softmax, one_hot

from fl_lightning.core import Batch, Client, GroupServer, Module, Payload, Server
from fl_lightning.foundation.rng import generator

_STATE = {
    "generator": "",
    "adam.steps": "step",
    "adam.first": "exp_avg",
    "adam.second": "exp_avg_sq",
}
"""What the server keeps, and what torch calls it."""


@dataclass(frozen=True)
class Generator:
    """G(y, eps): a class and noise to features. All of it is in `theta` (n,), which is given with
    every call.

    Args:
        classes: C.
        features: d.
        noise: width of eps.
        hidden: width of the hidden layer.
        code: as the authors' code has it: uniform noise within [0, 1), where it is normal, and
            BatchNorm between the hidden layer and its ReLU, whose weight, bias and running
            statistics are the end of `theta`.
    """

    classes: int
    features: int
    noise: int
    hidden: int
    code: bool = False

    def at_first(self, draws: torch.Generator) -> dict[str, Tensor]:
        """What the server keeps: `generator`, linear layers as torch begins them (uniform within 1
        / sqrt(inputs)), the steps and moments of Adam, and `labels` (C,), how many samples of each
        class those have who have taught it."""
        bounds = [(self.noise + self.classes) ** -0.5] * 2 + [self.hidden**-0.5] * 2
        each = zip(self._shapes(), bounds, strict=True)
        theta = torch.cat(
            [bound * (2 * torch.rand(r * c, generator=draws) - 1) for (r, c), bound in each]
        )
        # weight, bias, mean, variance
        normal = torch.tensor([[1.0], [0], [0], [1]]).expand(-1, self.hidden).flatten()
        theta = torch.cat([theta, normal]) if self.code else theta
        return {
            "generator": theta,
            "adam.steps": torch.zeros(()),
            "labels": torch.zeros(self.classes),
        } | {
            f"adam.{moment}": torch.zeros_like(theta[: len(theta) - self.moving])
            for moment in ("first", "second")
        }

    @property
    def moving(self) -> int:
        """How many numbers at the end of theta are running statistics, which no gradient moves."""
        return 2 * self.hidden * self.code

    def _shapes(self) -> list[tuple[int, int]]:
        inner = self.noise + self.classes
        return [
            (self.hidden, inner),
            (self.hidden, 1),
            (self.features, self.hidden),
            (self.features, 1),
        ]

    def __call__(
        self, theta: Tensor, y: Tensor, eps: Tensor, moving: Tensor | None = None
    ) -> Tensor:
        """Features (batch, d) of classes `y` (batch,) and noise `eps` (batch, noise).

        With `moving` (2, hidden), running means and variances, BatchNorm is in training: it
        normalises by the batch, and moves them in place. Without, it normalises by those in
        `theta`.
        """
        sizes = [r * c for r, c in self._shapes()]
        parts = theta.split([*sizes, len(theta) - sum(sizes)])
        W, b, V, c = (part.view(shape) for part, shape in zip(parts, self._shapes(), strict=False))
        h = linear(torch.cat([eps, one_hot(y, self.classes).to(eps)], 1), W, b[:, 0])
        if self.code:
            weight, bias, *still = parts[-1].view(-1, self.hidden)
            mean, variance = still if moving is None else moving
            h = batch_norm(h, mean, variance, weight, bias, training=moving is not None)
        return linear(h.relu(), V, c[:, 0])

    @property
    def products(self) -> int:
        """Multiply-adds of one pass of a sample."""
        return self.hidden * (self.noise + self.classes + self.features)

    def draw(
        self,
        theta: Tensor,
        prior: Tensor,
        count: int,
        draws: torch.Generator | None = None,
        moving: Tensor | None = None,
    ) -> Drawn:
        """Features, their classes, which are drawn by `prior` (C,), and their noise; `draws` None:
        the step's own."""
        y = torch.multinomial(prior, count, replacement=True, generator=draws)
        return self.given(theta, y, draws, moving)

    def given(
        self,
        theta: Tensor,
        y: Tensor,
        draws: torch.Generator | None = None,
        moving: Tensor | None = None,
    ) -> Drawn:
        """Features of the classes `y`."""
        noise = torch.rand if self.code else torch.randn
        eps = noise(len(y), self.noise, generator=draws, dtype=theta.dtype, device=theta.device)
        return Drawn(self(theta, y, eps, moving), y, eps)


@dataclass(frozen=True)
class Drawn:
    """What has been generated: features (n, d), their classes (n,) and their noise (n, noise)."""

    features: Tensor
    y: Tensor
    eps: Tensor


def alike(drawn: Drawn) -> Tensor:
    """exp(-mean over pairs of (mean squared distance of noise) (mean distance of features)), shape
    (): the diversity loss of FedGen's authors, 1 where all features are equal.
    """
    far = (drawn.features[:, None] - drawn.features).abs().mean(2)
    return torch.exp(-((drawn.eps[:, None] - drawn.eps).square().mean(2) * far).mean())


def uploaded_heads(group: GroupServer, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Weights (k, C, d) and biases (k, C) of the classifiers, one linear layer each, that `clients`
    uploaded last."""
    blocks = {b.name.rpartition(".")[2]: b for b in group.layout.blocks if b.head}
    weight, bias = blocks["weight"], blocks.get("bias")
    vectors = [group.vector(c).float().cpu() for c in clients]
    W = torch.stack([v[weight.start : weight.stop].view(weight.shape) for v in vectors])
    return W, W.new_zeros(W.shape[:2]) if bias is None else torch.stack(
        [v[bias.start : bias.stop] for v in vectors]
    )


def ensemble_loss(drawn: Drawn, heads: tuple[Tensor, Tensor], shares: Tensor | None) -> Tensor:
    """How little the clients' classifiers take what is `drawn` for its classes, shape ().

    Args:
        drawn: generated.
        heads: weights (k, C, d) and biases (k, C) of the clients.
        shares: (k, C), each client's share of the samples of a class: the mean cross entropy,
            weighed so. None: the cross entropy of the mean scores.
    """
    (weights, biases), y = heads, drawn.y
    scores = torch.einsum("bd,kcd->kbc", drawn.features, weights) + biases[:, None]
    if shares is None:
        return cross_entropy(scores.mean(0), y)
    each = torch.stack([cross_entropy(s, y, reduction="none") for s in scores])
    return (shares[:, y] * each).sum(0).mean()


def taught(
    G: Generator,
    memory: Mapping[str, Tensor],
    heads: tuple[Tensor, Tensor],
    labels: Tensor,
    draws: torch.Generator,
    weighted: bool,
    eta: float,
    lr: float,
    steps: int,
    size: int,
) -> dict[str, Tensor]:
    """What the server keeps after the clients' `heads` have taught the generator.

    As the authors' code has it (`G.code`), Adam has a weight decay of 0.01, its rate falls by 0.98
    with each call, and classes that have samples are drawn evenly (`labels` are 1 for each) in
    place of by their samples.

    Args:
        G: which one.
        memory: `at_first`, or the last answer.
        heads: as `uploaded_heads`.
        labels: samples of each class, (k, C), by client.
        draws: of classes and noise.
        weighted: `ensemble_loss` is given shares.
        eta: weight of `alike`.
        lr: of Adam.
        steps: of it.
        size: samples of a step.
    """
    state = {name: memory[name].clone() for name in _STATE}
    prior = labels.sum(0).float()
    shares = labels / prior.clamp_min(1) if weighted else None
    prior = prior.clamp_max(1) if G.code else prior
    count = len(state["adam.first"])
    learned = state["generator"][:count].clone().requires_grad_()
    moving = state["generator"][count:].view(2, -1) if G.code else None
    calls = int(state["adam.steps"]) // steps
    optimizer = torch.optim.Adam(
        [learned], lr * 0.98**calls if G.code else lr, weight_decay=0.01 * G.code
    )
    optimizer.state[learned] = {key: state[name] for name, key in _STATE.items() if key}
    for _ in range(steps):
        made = G.draw(learned, prior, size, draws, moving)
        optimizer.zero_grad()
        (ensemble_loss(made, heads, shares) + eta * alike(made)).backward()
        optimizer.step()
    theta = learned.detach() if moving is None else torch.cat([learned.detach(), moving.flatten()])
    return state | {"generator": theta, "labels": prior}


def learned(
    G: Generator,
    theta: Tensor,
    module: Module,
    y: Tensor,
    prior: Tensor,
    made: tuple[int, float],
    beta: float,
) -> Tensor:
    """What the generator adds to a client's loss, shape ().

    Args:
        G: which one.
        theta: what it is now.
        module: the client's, after its pass on a batch; its classifier is one linear layer.
        y: the classes of the batch.
        prior: how often each class is drawn, (C,).
        made: how many features are drawn, and the weight of the classifier's cross entropy on them.
        beta: weight of KL(classifier on features generated for `y` || model on the batch); the
            first is constant.
    """
    scores, (count, alpha) = partial(linear, weight=module.head.weight, bias=module.head.bias), made
    total = theta.new_zeros(())
    if alpha:
        drawn = G.draw(theta, prior, count)
        total = total + alpha * cross_entropy(scores(drawn.features), drawn.y)
    if beta:
        teacher = scores(G.given(theta, y).features).detach().softmax(1)
        total = total + beta * kl_div(
            log_softmax(scores(module.features), 1), teacher, reduction="batchmean"
        )
    return total


# --------------------------------------------------- what FedGen's server and clients do with these


def tell(server: Server, sent: Mapping[int, Payload]) -> None:
    """Put the generator, and how often classes are, into what is `sent`, once it has been
    taught."""
    for payload in sent.values() if server.memory["labels"].any() else ():
        payload.extra["generator"] = server.memory["generator"]
        payload.statistics["labels"] = server.memory["labels"]


def lesson(
    G: Generator, client: Client, payload: Payload, ratio: float, alpha: float, beta: float
) -> Callable[[Module, Batch], Tensor]:
    """The client's local loss: the task's, and what the generator in `payload` adds.

    Args:
        G: which one.
        client: at its visit.
        payload: what it has received.
        ratio: features that are generated for each sample of a batch.
        alpha: weight of the cross entropy on one of them.
        beta: as in `learned`.
    """
    extra, labels = payload.extra["generator"], payload.statistics["labels"]
    theta, prior = extra.to(client["model"]), labels.to(client["model"])

    def loss(module: Module, batch: Batch) -> Tensor:
        task: Tensor = module.task_loss(batch)
        made = (max(1, round(ratio * len(batch[1]))), ratio * alpha)
        client.flops += 2 * G.products * (made[0] * (alpha > 0) + len(batch[1]) * (beta > 0))
        return task + learned(G, theta, module, batch[1], prior, made, beta)

    return loss


def teach(
    server: Server, G: Generator, weighted: bool, eta: float, lr: float, steps: int, size: int
) -> None:
    """Have the classifiers of those who have answered teach the generator: `taught`, on what the
    server knows."""
    labels = torch.stack([server.statistics[c]["labels"] for c in server.answered])
    heads = uploaded_heads(server.only, server.answered)
    draws = generator(server.run.config.seed, "generator", server.round)
    server.memory.update(
        taught(G, server.memory, heads, labels, draws, weighted, eta, lr, steps, size)
    )
    server.flops += 6 * G.products * steps * size
