"""pFedMe: Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS
2020."""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.methods import (
    Batch,
    Choice,
    Client,
    LogRange,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    PlainMean,
    PlainSteps,
    PositiveInt,
    Server,
    Slot,
    Traits,
    move_on,
    searched,
    sees_only_the_mean,
)


@dataclass(frozen=True)
class PFedMe(PlainSteps, PlainMean):
    """In each local step a client approximately minimises the Moreau envelope of its loss, then
    moves its local model towards the minimiser.

    Step: theta ~ argmin f(theta) + (lam/2) ||theta - w||^2 on the batch, then w <- w - lr lam (w -
    theta). Scored: the last theta. For each batch theta starts at w (the paper leaves it open; the
    authors' code starts from the last theta).

    Args:
        lam: weight of the envelope's distance. 15: the authors' readme.
        inner_steps: gradient steps on theta for each batch, K. 5: the authors' readme.
        personal_lr: learning rate of these steps; they diverge from personal_lr * lam = 2 on. 0.09:
            the authors' readme.
        beta: the server's learning rate: w <- (1 - beta) w + beta mean, with the plain mean as in
            the paper (the authors' code weighs by samples). 1: the authors' readme.
    """

    traits = Traits(family="two models", judge="after", sample_use="takes steps of its own")

    lam: NonNegativeFloat = searched(
        15.0, LogRange(1, 20), "around the authors' 15; the steps on theta converge"
    )
    inner_steps: PositiveInt = 5
    personal_lr: NonNegativeFloat = searched(
        0.09, LogRange(0.005, 0.09), "to the authors', where large lam diverges"
    )
    beta: NonNegativeFloat = searched(
        1.0, Choice((1.0, 2.0)), "the authors' readme: 1, and 2 where tuned"
    )

    def slots(self) -> dict[str, Slot]:
        """The personalised model theta."""
        return {"personal": Slot()}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that takes `step` on each batch."""
        return [Phase(step=self.step, by_gradient=True)]

    def step(self, client: Client, batch: Batch) -> Tensor:
        """Take K steps on theta, then one of w; return the task loss at theta before the last of
        the K steps."""
        columns = client.layout.parameters
        w = client["model"]
        theta = client["personal"]
        theta.copy_(w)
        for _ in range(self.inner_steps):
            loss, gradient = client.gradient(theta, batch)
            theta[columns] -= self.personal_lr * (gradient + self.lam * (theta - w))[columns]
        w[columns] -= client.lr * self.lam * (w - theta)[columns]
        # running statistics come from the passes at theta
        w[columns.stop :] = theta[columns.stop :]
        return loss

    @sees_only_the_mean
    def aggregate(self, server: Server) -> None:
        """Average the models, then apply the server's learning rate."""
        old = [group["model"] for group in server.groups]
        super().aggregate(server)
        for group, model in zip(server.groups, old, strict=True):
            move_on(group, model, self.beta)

    def personal(self, client: Client) -> Tensor:
        return client["personal"]
