import torch

from fl_lightning.data.augment import PAD, Augmentation

BLACK = torch.tensor([-1.0, -2.0])[:, None, None]


def test_crop_by_hand():
    x = torch.arange(1.0, 13.0).reshape(1, 2, 2, 3).repeat(3, 1, 1, 1)
    cropped = Augmentation(True, BLACK).apply(
        x, torch.tensor([[0, PAD, PAD], [0, PAD + 1, PAD - 1], [1, PAD, PAD + 2]])
    )
    assert torch.equal(cropped[0], x[0])  # a shift by the padding is no shift
    # One down and one to the left: the last row moves up, black comes in below and at the left.
    assert cropped[1, 0].tolist() == [[-1, 4, 5], [-1, -1, -1]]
    assert cropped[1, 1].tolist() == [[-2, 10, 11], [-2, -2, -2]]
    # Two to the right, then mirrored.
    assert cropped[2, 0].tolist() == [[-1, -1, 3], [-1, -1, 6]]
