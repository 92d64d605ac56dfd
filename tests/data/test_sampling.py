import numpy as np

from fl_lightning.data.sampling import apportion


def test_apportion_by_hand():
    # 10 units by 1 : 2 : 3 are 1.67, 3.33, 5: floors 1, 3, 5, and the unit that is left goes to the
    # largest remainder.
    assert apportion(np.array([1, 2, 3]), 10).tolist() == [2, 3, 5]
    assert apportion(np.zeros(4), 6).tolist() == [2, 2, 1, 1]
    assert apportion(np.array([0.0, 5.0]), 0).tolist() == [0, 0]
