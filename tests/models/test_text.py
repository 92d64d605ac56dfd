"""Models of text, their loss and score over positions, and a federation of them."""

import pytest
import torch
from classes import FEDORA, MOON, FedAvg, FedProto
from reckoning import seeded
from refusals import refuses
from sklearn.metrics import balanced_accuracy_score
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fl_lightning.configuration.components import Component, Text
from fl_lightning.engine.build import federation as federate
from fl_lightning.foundation.metric import ACCURACY, NO_TARGET
from fl_lightning.lab.planning.made_up import DataSizes, made_up
from fl_lightning.models import build, head_of
from fl_lightning.models.base import SelfAttention
from fl_lightning.models.vit import ViT

SMALL = {
    "transformer.Transformer": {"depth": 1, "width": 16, "heads": 2},
    "lstm.LSTM": {"width": 16, "layers": 1},
    "textcnn.TextCNN": {"embedding": 8, "channels": 4},
}
LENGTH, VOCABULARY = 6, 11


def model_of(name, per_position, classes=3):
    torch.manual_seed(0)
    path = f"fl_lightning.models.{name}"
    return build(Component(path, SMALL[name]), (LENGTH,), classes, Text(VOCABULARY, per_position))


@pytest.mark.parametrize("name", SMALL)
def test_models_of_text(name):
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    model = model_of(name, False).eval()
    assert model(tokens).shape == (4, 3) and model.get_submodule(head_of(model)).out_features == 3
    if "CNN" in name:
        with refuses("for next tokens use transformer or lstm"):
            model_of(name, True, VOCABULARY)
        with refuses(r"model\.widths=\[9\].* from 1 to the 6 tokens"):
            build(
                Component("fl_lightning.models.textcnn.TextCNN", {"widths": [9]}),
                (LENGTH,),
                3,
                Text(5, False),
            )
        return
    model = model_of(name, True, VOCABULARY).eval()
    scores = model(tokens)
    assert scores.shape == (4, LENGTH, VOCABULARY)
    later = tokens.clone()
    later[:, 3:] = (later[:, 3:] + 1) % VOCABULARY  # nobody sees what is to come
    assert torch.allclose(model(later)[:, :3], scores[:, :3], atol=1e-6)
    assert not torch.allclose(model(later)[:, 3:], scores[:, 3:])


def test_sizes_are_those_of_the_papers():
    lstm = build(Component("fl_lightning.models.lstm.LSTM"), (80,), 90, Text(90, True))
    gates = sum(4 * 256 * (n + 256) + 2 * 4 * 256 for n in (8, 256))
    assert sum(p.numel() for p in lstm.parameters()) == 90 * 8 + gates + 256 * 90 + 90
    gpt = build(Component("fl_lightning.models.transformer.Transformer"), (64,), 65, Text(65, True))
    layer = 12 * 128 * 128 + 13 * 128
    assert (
        sum(p.numel() for p in gpt.parameters()) == (65 + 64) * 128 + 4 * layer + 2 * 128 + 65 * 129
    )
    assert (
        sum(p.numel() for p in ViT((3, 32, 32), 10).parameters())
        == 48 * 128 + 128 + 66 * 128 + 6 * layer + 256 + 1290
    )


@pytest.mark.parametrize(
    "shape, args, said",
    [
        ((1, 8, 9), {}, "images must be square"),
        ((1, 6, 6), {}, "multiple of it"),
        ((1, 8, 8), {"heads": 3}, "width 128"),
    ],
)
def test_images_that_cannot_be_cut_into_patches_are_refused(shape, args, said):
    with refuses(said):
        ViT(shape, 10, **args)


# ---------------------------------------------------------------- loss and score


def test_positions_without_a_target_do_not_count():
    """A sample's loss and its share of right answers are means over those that have one; of none at
    all: 0."""
    scores, y = torch.randn(3, 4, VOCABULARY).double(), torch.randint(VOCABULARY, (3, 4))
    y[0, 2:], y[2] = NO_TARGET, NO_TARGET
    each = ACCURACY.loss(scores, y, "none")
    assert_close(each[0], cross_entropy(scores[0, :2], y[0, :2]))
    assert_close(each[1], cross_entropy(scores[1], y[1]))
    assert float(each[2]) == 0
    scores[0, 0, y[0, 0]] = scores[1, :, :].max() + 50
    scores[0, 1, y[0, 1]] = -100
    share = float((scores[1].argmax(-1) == y[1]).double().mean())
    assert float(ACCURACY.total(scores, y, VOCABULARY)) == pytest.approx(0.5 + share)


# ---------------------------------------------------------------- a federation


def texts(per_position=True, classes=VOCABULARY):
    """Tokens that count up, from anywhere: the next one is known."""
    text = Text(VOCABULARY, per_position)
    data = made_up(DataSizes([40] * 4, [10] * 4, (LENGTH,), classes, text=text))
    for samples in (data._train, data._test):
        first = torch.randint(VOCABULARY, (len(samples.raw), 1), generator=seeded(0))
        samples.raw.copy_((first + torch.arange(LENGTH)) % VOCABULARY)
        samples.labels.copy_(
            (samples.raw + 1) % VOCABULARY if per_position else samples.raw[:, 0] % classes
        )
    return data


def around(make, method, name, data, **changes):
    """A federation on texts."""
    fed = make(method, **changes)
    run, fabric = fed.run, fed.worker.trainers[0].fabric
    model = model_of(name, data.text.per_position, data.num_classes).to(run.dtype)
    return federate(fabric, run.config, data, [model], run.method, [], run.folder)


@pytest.mark.parametrize("method", [FedProto(), MOON()])
def test_methods_that_go_by_a_samples_class_refuse_next_tokens(federation, method):
    with refuses("needs one class for each sample, but here each token"):
        around(federation, method, "transformer.Transformer", texts())


def test_attention_is_torchs():
    """With the same weights, causal or not."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    for causal in (False, True):
        ours = SelfAttention(8, 2, causal)
        for k, part in enumerate((ours.query, ours.key, ours.value)):
            part.weight.data = theirs.in_proj_weight.detach()[8 * k : 8 * k + 8]
        ours.out.weight.data = theirs.out_proj.weight.detach()
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1) if causal else None
        assert_close(ours(x)[0], theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_further_metrics_are_over_positions(federation):
    """Calibration and the like of all positions, as sklearn would see them; newcomers' samples are
    counted in all."""
    options = {"evaluation": {"metrics": ["balanced_accuracy"]}, "batch_size": 8, "rounds": 1}
    fed = around(federation, FedAvg(), "transformer.Transformer", texts(), **options)
    [row] = [r for r in fed.round(1).clients if r["client"] == 0]
    client = fed.evaluator.at_rest(0)
    [(x, y)] = client.data.test.batches(100)
    scores = client.bind(fed.run.groups[0].vectors["model"]).model.eval()(x)
    wanted = balanced_accuracy_score(y.flatten(), scores.argmax(-1).flatten())
    assert row["balanced_accuracy_global"] == pytest.approx(wanted)


def test_subspaces_of_token_numbers_are_refused(federation):
    with refuses(r"method\.similarity='subspace'.* tokens span no subspace"):
        around(federation, FEDORA(), "transformer.Transformer", texts())
