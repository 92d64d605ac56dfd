import pytest
import torch
from torch import nn

from fl_lightning.engine.record import spread
from fl_lightning.foundation.metric import ACCURACY, MAE


def test_absolute_error_by_hand():
    output, y = torch.tensor([[1.0], [2.0], [-4.0]]), torch.tensor([1.5, 2.0, -1.0])
    assert float(MAE.total(output, y, 1)) == pytest.approx(0.5 + 0 + 3)
    assert float(MAE.loss(output, y)) == pytest.approx((0.25 + 0 + 9) / 3)
    assert MAE.loss(output, y, "none").tolist() == [0.25, 0, 9]
    # Another width of the same numbers, as in bf16-mixed or 64-true, gives a loss of that width
    # with gradients.
    wide = output.double().requires_grad_()
    MAE.loss(wide, y).backward()
    torch.testing.assert_close(wide.grad[:, 0], 2 / 3 * (output[:, 0] - y).double())


def test_accuracy_and_its_loss_by_hand():
    output, y = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0]]), torch.tensor([0, 1])
    assert float(ACCURACY.total(output, y, 3)) == 1
    assert torch.equal(ACCURACY.loss(output, y), nn.functional.cross_entropy(output, y))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_totals_of_several_batches_are_those_of_each(shape):
    draws = torch.Generator().manual_seed(0)
    outputs = [torch.randn(n, *shape, 3, generator=draws) for n in (5, 1, 7)]
    ys = [torch.randint(3, output.shape[:-1], generator=draws) for output in outputs]
    for score, y in ((ACCURACY, ys), (MAE, [y.float() for y in ys])):
        if score is ACCURACY or not shape:
            each = [score.total(output, own, 3) for output, own in zip(outputs, y, strict=True)]
            for ours, theirs in zip(score.totals(outputs, y, 3), each, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_worst_tenth_is_the_one_with_the_largest_errors():
    scores = [float(k) for k in range(20)]
    assert spread(scores, MAE)["worst"] == pytest.approx(18.5)
    assert spread(scores, ACCURACY)["worst"] == pytest.approx(0.5)
    assert spread(scores, MAE)["mean"] == spread(scores, ACCURACY)["mean"] == 9.5


def test_gains_are_positive_where_ours_is_better():
    assert ACCURACY.gain(0.6, 0.5) == pytest.approx(0.2)
    assert MAE.gain(1.5, 2.0) == pytest.approx(0.25)  # (local - ours) / local
    assert MAE.gain(3.0, 2.0) == pytest.approx(-0.5)
