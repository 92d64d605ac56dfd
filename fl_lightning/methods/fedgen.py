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
    """FedAvg with a generator of features: the server trains it with the clients' classifiers, and
    its features help to train clients.

    The generator G makes features from a class and noise e. A client's loss, from the second round
    on: CE + ratio alpha CE(head(G(y', e)), y') + beta KL(head(G(y, e)) || model(x)). y are the
    batch's classes; classes y' are drawn as often as the cohort that trained G has them. The server
    trains G by Adam on the cross entropy of the mean scores of the cohort's classifiers on G(y',
    e), plus the diversity loss eta exp(-mean |e_a - e_b|^2 |G_a - G_b|).

    Args:
        alpha: weight of a generated sample. 1: paper (Eq. 5); the authors' code: 10.
        beta: weight of the distillation. 0: paper (Eq. 5); the authors' code: 10.
        decay: factor on alpha and beta from round to round. 1: paper (Eq. 5); the authors' code:
            0.98.
        ratio: number of generated samples for each sample of the batch. 1: the authors' code.
        eta: weight of the diversity loss. 1: the authors' code.
        teacher: loss of the generator: cross entropy of the clients' `mean` scores (paper, Eq. 4),
            or the `weighted` mean of each client's cross entropy, by the clients' shares of the
            class's samples (the authors' code).
        generator: `paper` (normal noise, classes drawn as often as the cohort has them), or as in
            the authors' `code`: uniform noise, BatchNorm after the hidden layer, all classes of the
            cohort drawn equally often, and for Adam a weight decay of 0.01 and a learning rate that
            falls by 0.98 a round.
        generator_lr: learning rate of Adam. 3e-4: the authors' code.
        generator_steps: steps of Adam in a round. 50: the authors' code.
        generator_batch: samples in a step of Adam. 32: the authors' code. 2 at least, since the
            diversity loss compares them.
        noise: width of e. 32: the authors' code (MNIST).
        hidden: width of the generator's hidden layer. 256: the authors' code (MNIST).
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
        """The initial generator and the state of its optimiser, as `Generator.initial_tensors`
        returns them."""
        return self._generator(run).initial_tensors(rng.generator(run.config.seed, "generator"))

    def broadcast(self, server: Server) -> Payloads:
        """Also send the generator and its class frequencies, once it has been trained."""
        payloads = super().broadcast(server)
        memory = server.memory
        if memory["labels"].any():
            for payload in payloads.values():
                payload.extra["generator"] = memory["generator"]
                payload.statistics["labels"] = memory["labels"]
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase; its loss has the generator's terms if the client has received a
        generator, and alpha or beta is above 0."""
        if "generator" not in payload.extra or not (self.alpha or self.beta):
            return [Phase()]
        return [Phase(objective=Objective(loss=self.local_loss(client, payload)))]

    def local_loss(self, client: Client, payload: Payload) -> Callable[[Module, Batch], Tensor]:
        """Return the local loss: the task loss plus the terms of the generator in `payload`."""
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
            client.flops += 2 * G.multiply_adds * (count * (alpha > 0) + size * (beta > 0))
            weights = {"alpha": self.ratio * alpha, "beta": beta}
            return task + generator_loss(G, theta, module, batch[1], prior, count=count, **weights)

        return loss

    def beside(self) -> dict[str, Beside]:
        return {"labels": Beside("counts", "samples of each class", "counts")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the number of the client's samples in each class."""
        upload = super().upload(client, payload)
        upload.statistics["labels"] = client.class_counts.int()
        return upload

    def aggregate(self, server: Server) -> None:
        """Train the generator with the uploaded classifiers; then average the models as FedAvg."""
        G = self._generator(server.run)
        answered = server.answered
        labels = torch.stack([server.statistics[c]["labels"] for c in answered])
        draws = rng.generator(server.run.config.seed, "generator", server.round)
        heads = uploaded_heads(server.only, answered)
        server.memory |= self.train_generator(G, server.memory, heads, labels, draws)
        server.flops += 6 * G.multiply_adds * self.generator_steps * self.generator_batch
        super().aggregate(server)

    def train_generator(
        self,
        G: Generator,
        memory: Tensors,
        heads: tuple[Tensor, Tensor],
        labels: Tensor,
        draws: torch.Generator,
    ) -> Tensors:
        """Train the generator with the clients' classifiers; return the server's new tensors.

        With `generator code`, Adam has a weight decay of 0.01 and a rate that falls by 0.98 with
        each call, and all classes with samples are drawn equally often (the returned `labels` are 1
        for each).

        Args:
            G: computes features from the parameters in `memory`.
            memory: the tensors of `Generator.initial_tensors`, or of this method's last call.
            heads: the clients' classifiers, as `uploaded_heads` returns them.
            labels: samples of each class, by client, (k, C).
            draws: random generator of classes and noise.
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
            generated = G.sample_features(theta, prior, self.generator_batch, draws, moving)
            loss = ensemble_loss(generated, heads, shares) + self.eta * diversity_loss(generated)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        adam_tensors = {f"adam.{name}": adam[key] for key, name in ADAM.items()}
        return adam_tensors | {"generator": torch.cat([theta.detach(), moving]), "labels": prior}

    def _generator(self, run: RunContext) -> Generator:
        sizes = (run.data.num_classes, run.feature_width, self.noise, self.hidden)
        return Generator(*sizes, self.generator == "code")


ADAM = {"step": "steps", "exp_avg": "first", "exp_avg_sq": "second"}
"""Names `adam.NAME` in the server's memory of Adam's state, by torch's names."""


@dataclass(frozen=True)
class Generator:
    """G(y, eps): features from a class and noise, by two linear layers with a ReLU between them.
    All parameters are in a vector `theta` (n,), an argument of each call.

    Args:
        classes: C.
        features: d.
        noise: width of eps.
        hidden: width of the hidden layer.
        code: as in the authors' code: noise is uniform in [0, 1) instead of normal, and BatchNorm
            precedes the ReLU; its weight, bias and running statistics are the end of `theta`.
    """

    classes: int
    features: int
    noise: int
    hidden: int
    code: bool = False

    def initial_tensors(self, draws: torch.Generator) -> Tensors:
        """Return the server's initial tensors: `generator`, with linear layers as torch initialises
        them (uniform within 1 / sqrt(inputs)); Adam's step count and moments; `labels` (C,), the
        samples of each class of the clients whose classifiers have trained the generator, 0 at
        first."""
        parts = []
        for rows, columns in self._shapes():
            inputs = self.noise + self.classes if rows == self.hidden else self.hidden
            parts.append(inputs**-0.5 * (2 * torch.rand(rows * columns, generator=draws) - 1))
        moments = sum(map(len, parts))
        if self.code:  # BatchNorm's weight and bias, which Adam trains; mean and variance
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

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a forward pass of one sample."""
        return self.hidden * (self.noise + self.classes + self.features)

    def sample_features(
        self,
        theta: Tensor,
        prior: Tensor,
        count: int,
        draws: torch.Generator | None = None,
        moving: Tensor | None = None,
    ) -> Generated:
        """Draw classes and generate their features.

        Args:
            theta: the generator's parameters.
            prior: relative frequencies of the classes, (C,).
            count: number of samples.
            draws: random generator of classes and noise. None: torch's global one, which the engine
                has seeded for the client's training.
            moving: as in `features_of`.
        """
        y = torch.multinomial(prior, count, replacement=True, generator=draws)
        return self.features_of(theta, y, draws, moving)

    def features_of(
        self,
        theta: Tensor,
        y: Tensor,
        draws: torch.Generator | None = None,
        moving: Tensor | None = None,
    ) -> Generated:
        """Generate features of the classes `y` (batch,).

        Args:
            theta: the generator's parameters.
            y: classes, (batch,).
            draws: random generator of the noise. None: torch's global one, which the engine has
                seeded for the client's training.
            moving: running means and variances of BatchNorm, (2 hidden,). If given, BatchNorm
                normalises by the batch and updates them in place. None: it normalises by those in
                `theta`.
        """
        noise = torch.rand if self.code else torch.randn
        eps = noise(len(y), self.noise, generator=draws, dtype=theta.dtype, device=theta.device)
        shapes = self._shapes()
        sizes = [rows * columns for rows, columns in shapes]
        *parts, normalisation = theta.split([*sizes, len(theta) - sum(sizes)])
        W, b, V, c = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        h = linear(torch.cat([eps, one_hot(y, self.classes).to(eps)], 1), W, b[:, 0])
        if self.code:
            weight, bias, *statistics = normalisation.view(-1, self.hidden)
            mean, variance = statistics if moving is None else moving.view(2, -1)
            h = batch_norm(h, mean, variance, weight, bias, training=moving is not None)
        return Generated(linear(h.relu(), V, c[:, 0]), y, eps)


class Generated(NamedTuple):
    """Generated features, their classes and the noise that they were made from."""

    features: Tensor
    """(n, d)."""
    y: Tensor
    """Classes, (n,)."""
    eps: Tensor
    """Noise, (n, noise)."""


def diversity_loss(generated: Generated) -> Tensor:
    """Return exp(-mean over pairs of (mean squared distance of noise) (mean absolute distance of
    features)), shape (): the diversity loss of FedGen's authors, 1 if all features are equal."""
    features = (generated.features[:, None] - generated.features).abs().mean(2)
    noise = (generated.eps[:, None] - generated.eps).square().mean(2)
    return torch.exp(-(noise * features).mean())


def uploaded_heads(group: GroupServer, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return weights (k, C, d) and biases (k, C) of the classifiers, one linear layer each, that
    `clients` uploaded last."""
    vectors = [group.vector(client) for client in clients]
    tensors = {}
    for block in group.layout.blocks:
        if block.head:
            rows = torch.stack([vector[block.columns] for vector in vectors]).float().cpu()
            tensors[block.name.rpartition(".")[2]] = rows.unflatten(1, block.shape)
    weights = tensors["weight"]
    return weights, tensors.get("bias", weights.new_zeros(weights.shape[:2]))


def ensemble_loss(
    generated: Generated, heads: tuple[Tensor, Tensor], shares: Tensor | None
) -> Tensor:
    """Return the cross entropy of the clients' classifiers on generated features, shape ().

    Args:
        generated: features and their classes.
        heads: weights (k, C, d) and biases (k, C) of the clients' classifiers.
        shares: each client's share of the samples of a class, (k, C): the clients' cross entropies
            are weighted by them. None: the cross entropy of the mean scores.
    """
    weights, biases = heads
    y = generated.y
    scores = torch.einsum("bd,kcd->kbc", generated.features, weights) + biases[:, None]
    if shares is None:
        return cross_entropy(scores.mean(0), y)
    losses = torch.stack([cross_entropy(s, y, reduction="none") for s in scores])
    return (shares[:, y] * losses).sum(0).mean()


def generator_loss(
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
    """Return the generator's terms of a client's loss, shape ().

    Args:
        G: computes features from `theta`.
        theta: the received parameters of the generator.
        module: holds the client's model, after its pass on the batch; its classifier is one linear
            layer.
        y: classes of the batch.
        prior: relative frequencies of the classes to draw, (C,).
        count: number of features to draw.
        alpha: weight of the classifier's cross entropy on drawn features.
        beta: weight of KL(classifier on features generated for `y` || model on the batch); the
            first distribution has no gradient.
    """
    head = module.head
    total = theta.new_zeros(())
    if alpha:
        generated = G.sample_features(theta, prior, count)
        scores = linear(generated.features, head.weight, head.bias)
        total = total + alpha * cross_entropy(scores, generated.y)
    if beta:
        features = G.features_of(theta, y).features
        teacher = linear(features, head.weight, head.bias).detach().softmax(1)
        student = log_softmax(linear(module.features, head.weight, head.bias), 1)
        total = total + beta * kl_div(student, teacher, reduction="batchmean")
    return total
