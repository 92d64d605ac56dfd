"""FedGen: Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.
ICML 2021."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy, kl_div, linear, log_softmax, one_hot

from fl_lightning.foundation import rng
from fl_lightning.methods import (
    Batch,
    Beside,
    Choice,
    Client,
    GroupServer,
    LogRange,
    Method,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PositiveAdamRate,
    PositiveFloat,
    PositiveInt,
    Range,
    RunContext,
    Server,
    Tensors,
    Traits,
    searched,
)


@dataclass(frozen=True)
class FedGen(Method):
    """FedAvg with a generator of features, trained on the server by clients' classifiers; its
    features train clients.

    Client, from the second round: CE + ratio alpha CE(head(G(y', e)), y') + beta KL(head(G(y, e))
    || model(x)), with y' drawn as labels are in the cohort that taught, y those of the batch.
    Server: Adam on the cross entropy of the mean scores of the cohort's classifiers on G(y', e), +
    eta exp(-mean |e_a - e_b|^2 |G_a - G_b|).

    Args:
        alpha, beta, decay: weights of generated samples and of the distillation, and what is left
            of both in each next round. 1, 0 and 1: paper (Eq. 5); the authors' code: 10, 10 and
            0.98.
        ratio, eta: generated samples for each of the batch, and the weight of diversity. 1: the
            authors' code.
        teacher: cross entropy of the `mean` scores (paper, Eq. 4), or the `weighted` mean of the
            clients' own, by their shares of the class (the authors' code).
        generator: `paper` (normal noise, classes drawn as often as the cohort has them), or as the
            authors' `code` has it: uniform noise, BatchNorm behind the hidden layer, classes that
            the cohort holds drawn evenly, and for Adam a weight decay of 0.01 and a rate that falls
            by 0.98 a round.
        generator_lr, generator_steps, generator_batch: of Adam in a round. 3e-4, 50 and 32: the
            authors' code. A batch has 2 samples at least, since diversity compares them.
        noise, hidden: widths of e, and of the generator's hidden layer. 32 and 256: the authors'
            code (MNIST).
    """

    traits = Traits(
        family="prototypes and distillation",
        features=True,
        classes=True,
        statistics=True,
        several=False,
        receives_beside="a generator, class counts of all",
        sample_use="uploads class counts of samples",
    )

    alpha: NonNegativeFloat = searched(
        1.0, LogRange(0.1, 10), "from a tenth of the paper's to the authors' 10"
    )
    beta: NonNegativeFloat = searched(
        0.0, Choice((0.0, 0.1, 1.0, 10.0)), "the paper's 0 to the authors' 10"
    )
    decay: PositiveFloat = 1.0
    ratio: PositiveAdamRate = 1.0
    teacher: Literal["mean", "weighted"] = "mean"
    eta: NonNegativeFloat = 1.0
    generator: Literal["paper", "code"] = "paper"
    generator_lr: PositiveAdamRate = 3e-4
    generator_steps: PositiveInt = 50
    generator_batch: Annotated[int, Range(2)] = 32
    noise: PositiveInt = 32
    hidden: PositiveInt = 256

    def init_server(self, run: RunContext) -> Tensors:
        """The generator."""
        return self._generator(run).at_first(rng.generator(run.config.seed, "generator"))

    def broadcast(self, server: Server) -> Payloads:
        """Also send the generator and how often classes are, once it has been taught."""
        payloads = super().broadcast(server)
        memory = server.memory
        if memory["labels"].any():
            for payload in payloads.values():
                payload.extra["generator"] = memory["generator"]
                payload.statistics["labels"] = memory["labels"]
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """With what the generator adds to the loss, if it does."""
        if "generator" not in payload.extra or not (self.alpha or self.beta):
            return [Phase()]
        return [Phase(objective=Objective(loss=self.lesson(client, payload)))]

    def lesson(self, client: Client, payload: Payload) -> Callable[[Module, Batch], Tensor]:
        """The client's local loss: the task's, and what the generator in `payload` adds."""
        G = self._generator(client.run)
        fade = self.decay ** (client.round - 1)
        alpha = self.alpha * fade
        beta = self.beta * fade
        theta = payload.extra["generator"].to(client["model"])
        prior = payload.statistics["labels"].to(client["model"])

        def loss(module: Module, batch: Batch) -> Tensor:
            task = module.task_loss(batch)
            size = len(batch[1])
            count = max(1, round(self.ratio * size))
            client.flops += 2 * G.products * (count * (alpha > 0) + size * (beta > 0))
            weights = {"alpha": self.ratio * alpha, "beta": beta}
            return task + learned(G, theta, module, batch[1], prior, count=count, **weights)

        return loss

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"labels": Beside("counts", "samples of each class", "counts")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload how many samples the client has of each class."""
        upload = super().upload(client, payload)
        upload.statistics["labels"] = client.class_counts.int()
        return upload

    def aggregate(self, server: Server) -> None:
        """The classifiers of those who have answered teach the generator; then FedAvg's mean."""
        G = self._generator(server.run)
        who = server.answered
        labels = torch.stack([server.statistics[c]["labels"] for c in who])
        draws = rng.generator(server.run.config.seed, "generator", server.round)
        heads = uploaded_heads(server.only, who)
        server.memory |= self.taught(G, server.memory, heads, labels, draws)
        server.flops += 6 * G.products * self.generator_steps * self.generator_batch
        super().aggregate(server)

    def taught(
        self,
        G: Generator,
        memory: Tensors,
        heads: tuple[Tensor, Tensor],
        labels: Tensor,
        draws: torch.Generator,
    ) -> Tensors:
        """What the server keeps after the clients' `heads` have taught the generator.

        With `generator code` Adam has a weight decay of 0.01, its rate falls by 0.98 with each
        call, and classes that have samples are drawn evenly (`labels` are 1 for each) in place of
        by their samples.

        Args:
            G: which one.
            memory: `at_first`, or the last answer.
            heads: as `uploaded_heads`.
            labels: samples of each class, (k, C), by client.
            draws: of classes and noise.
        """
        adam = {key: memory[f"adam.{name}"].clone() for key, name in ADAM.items()}
        count = len(adam["exp_avg"])
        theta = memory["generator"][:count].clone().requires_grad_()
        moving = memory["generator"][count:].clone()
        prior = labels.sum(0).float()
        shares = labels / prior.clamp_min(1) if self.teacher == "weighted" else None
        lr = self.generator_lr
        decay = 0.0
        if G.code:
            prior = prior.clamp_max(1)
            lr = lr * 0.98 ** (int(adam["step"]) // self.generator_steps)
            decay = 0.01
        optimizer = torch.optim.Adam([theta], lr, weight_decay=decay)
        optimizer.state[theta] = adam
        for _ in range(self.generator_steps):
            drawn = G.draw(theta, prior, self.generator_batch, draws, moving)
            loss = ensemble_loss(drawn, heads, shares) + self.eta * alike(drawn)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after = {f"adam.{name}": adam[key] for key, name in ADAM.items()}
        return after | {"generator": torch.cat([theta.detach(), moving]), "labels": prior}

    def _generator(self, run: RunContext) -> Generator:
        sizes = (run.data.num_classes, run.feature_width, self.noise, self.hidden)
        return Generator(*sizes, self.generator == "code")


ADAM = {"step": "steps", "exp_avg": "first", "exp_avg_sq": "second"}
"""The server's names `adam.NAME` of Adam's state, by torch's names."""


@dataclass(frozen=True)
class Generator:
    """G(y, eps): a class and noise to features, by two linear layers with a ReLU between them. All
    of it is in `theta` (n,), which is given with every call.

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

    def at_first(self, draws: torch.Generator) -> Tensors:
        """What the server keeps: `generator`, linear layers as torch begins them (uniform within 1
        / sqrt(inputs)), the steps and moments of Adam, and `labels` (C,), how many samples of each
        class those have who have taught it."""
        parts = []
        for rows, columns in self._shapes():
            inputs = self.noise + self.classes if rows == self.hidden else self.hidden
            parts.append(inputs**-0.5 * (2 * torch.rand(rows * columns, generator=draws) - 1))
        moments = sum(map(len, parts))
        if self.code:  # weight and bias, which Adam moves, mean and variance
            moments += 2 * self.hidden
            parts += [torch.full((self.hidden,), value) for value in (1.0, 0.0, 0.0, 1.0)]
        return {
            "generator": torch.cat(parts),
            "adam.steps": torch.zeros(()),
            "adam.first": torch.zeros(moments),
            "adam.second": torch.zeros(moments),
            "labels": torch.zeros(self.classes),
        }

    def _shapes(self) -> list[tuple[int, int]]:
        h = self.hidden
        d = self.features
        return [(h, self.noise + self.classes), (h, 1), (d, h), (d, 1)]

    def __call__(
        self,
        theta: Tensor,
        y: Tensor,
        eps: Tensor,
        moving: Tensor | None = None,
    ) -> Tensor:
        """Features (batch, d) of classes `y` (batch,) and noise `eps` (batch, noise).

        With `moving` (2 hidden,), running means and variances, BatchNorm is in training: it
        normalises by the batch, and moves them in place. Without, it normalises by those in
        `theta`.
        """
        sizes = [r * c for r, c in self._shapes()]
        *parts, normalisation = theta.split([*sizes, len(theta) - sum(sizes)])
        W, b, V, c = (part.view(shape) for part, shape in zip(parts, self._shapes(), strict=True))
        h = linear(torch.cat([eps, one_hot(y, self.classes).to(eps)], 1), W, b[:, 0])
        if self.code:
            weight, bias, *statistics = normalisation.view(-1, self.hidden)
            mean, variance = statistics if moving is None else moving.view(2, -1)
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


class Drawn(NamedTuple):
    """What has been generated."""

    features: Tensor
    """(n, d)."""
    y: Tensor
    """Classes, (n,)."""
    eps: Tensor
    """Noise, (n, noise)."""


def alike(drawn: Drawn) -> Tensor:
    """exp(-mean over pairs of (mean squared distance of noise) (mean distance of features)), shape
    (): the diversity loss of FedGen's authors, 1 where all features are equal.
    """
    features = (drawn.features[:, None] - drawn.features).abs().mean(2)
    noise = (drawn.eps[:, None] - drawn.eps).square().mean(2)
    return torch.exp(-(noise * features).mean())


def uploaded_heads(group: GroupServer, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Weights (k, C, d) and biases (k, C) of the classifiers, one linear layer each, that `clients`
    uploaded last."""
    vectors = [group.vector(client) for client in clients]
    tensors = {}
    for block in group.layout.blocks:
        if block.head:
            rows = torch.stack([vector[block.columns] for vector in vectors]).float().cpu()
            tensors[block.name.rpartition(".")[2]] = rows.unflatten(1, block.shape)
    weights = tensors["weight"]
    return weights, tensors.get("bias", weights.new_zeros(weights.shape[:2]))


def ensemble_loss(drawn: Drawn, heads: tuple[Tensor, Tensor], shares: Tensor | None) -> Tensor:
    """How little the clients' classifiers take what is `drawn` for its classes, shape ().

    Args:
        drawn: generated.
        heads: weights (k, C, d) and biases (k, C) of the clients.
        shares: (k, C), each client's share of the samples of a class: the mean cross entropy,
            weighed so. None: the cross entropy of the mean scores.
    """
    weights, biases = heads
    y = drawn.y
    scores = torch.einsum("bd,kcd->kbc", drawn.features, weights) + biases[:, None]
    if shares is None:
        return cross_entropy(scores.mean(0), y)
    losses = torch.stack([cross_entropy(s, y, reduction="none") for s in scores])
    return (shares[:, y] * losses).sum(0).mean()


def learned(
    G: Generator,
    theta: Tensor,
    module: Module,
    y: Tensor,
    prior: Tensor,
    *,
    count: int,
    alpha: float,
    beta: float,
) -> Tensor:
    """What the generator adds to a client's loss, shape ().

    Args:
        G: which one.
        theta: what it is now.
        module: the client's, after its pass on a batch; its classifier is one linear layer.
        y: the classes of the batch.
        prior: how often each class is drawn, (C,).
        count: how many features are drawn.
        alpha: weight of the classifier's cross entropy on them.
        beta: weight of KL(classifier on features generated for `y` || model on the batch); the
            first is constant.
    """
    head = module.head
    total = theta.new_zeros(())
    if alpha:
        generated = G.draw(theta, prior, count)
        scores = linear(generated.features, head.weight, head.bias)
        total = total + alpha * cross_entropy(scores, generated.y)
    if beta:
        features = G.given(theta, y).features
        teacher = linear(features, head.weight, head.bias).detach().softmax(1)
        student = log_softmax(linear(module.features, head.weight, head.bias), 1)
        total = total + beta * kl_div(student, teacher, reduction="batchmean")
    return total
