"""One mix of models by the kernel of the server, for tests of what relations come to."""

import torch

from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import Mixer
from fl_lightning.foundation.parallel import RankGroup


class Alone(RankGroup):
    """A single process, without Fabric."""

    def __init__(self):
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")


def mixed(W, A, receivers):
    """What `receivers` (m) receive of the models W (n, D) by rows A (m, n)."""
    into = {c: torch.empty_like(W[0]) for c in receivers}
    mixer = Mixer(Alone(), [0] * len(W), dict(enumerate(W)), list(range(len(W))))
    mixer.mix([Segment(0, W.shape[1], 0)], A[None], list(receivers), into)
    return torch.stack([into[c] for c in receivers])
