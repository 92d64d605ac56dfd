"""Smartwatch recordings of shoulder exercises (Burns et al., Physiological Measurement 2018), from
seglearn (BSD).

10 persons, 7 exercises, each with either arm: 140 recordings of 6 axes (acceleration and rotation)
at 50 Hz.
"""

from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import windows
from fl_lightning.data.source import Absent, SamplePool, Source
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import install_hint

WINDOW, STEP = 100, 50
"""Samples in a window, and from the start of one to the next. 2 s: about one repetition; half of a
window is usual (ours)."""
SHAPE, CLASSES = (6, WINDOW), 7


def load(data: DataConfig) -> Source:
    """Read windows (6, 100) float32; the natural groups are persons. The last fifth of each
    recording is its test part.

    Args:
        data: not used.

    Raises:
        Absent: seglearn is not installed.
        BadInput: its file cannot be read.
    """
    spec = find_spec("seglearn")  # its file alone is read: importing it takes a second
    if spec is None or spec.origin is None:
        raise Absent("data.source", "watch", install_hint("seglearn"))
    file = Path(spec.origin).parent / "data" / "watch_dataset.npy"
    try:
        content = np.load(file, allow_pickle=True).item()
        series = [np.asarray(recording, np.float32) for recording in content["X"]]
        exercise = np.asarray(content["y"]).astype(np.int64)
        person = np.asarray(content["subject"]).astype(np.int64)
        names = [str(name) for name in content["y_labels"]]
        for number, recording in enumerate(series, 1):
            if recording.ndim != 2 or recording.shape[1] != SHAPE[0]:
                shape = f"{recording.shape}, not (samples, {SHAPE[0]})"
                raise ValueError(f"recording {number} has the shape {shape}")
        if not len(series) == len(exercise) == len(person):
            counts = (
                f"{len(series)} recordings, {len(exercise)} exercises and {len(person)} persons"
            )
            raise ValueError(counts)
    except (OSError, ValueError, KeyError, AttributeError, EOFError, UnpicklingError) as error:
        raise BadInput(
            "data.source", "watch", f"seglearn's file {file.name} cannot be read ({error})"
        ) from error
    persons, groups = np.unique(person, return_inverse=True)
    parts = windows.cut(
        [len(recording) for recording in series],
        WINDOW,
        STEP,
    )
    train, test = (_pool(series, exercise, groups, spans) for spans in parts)
    return Source(
        train,
        test,
        names,
        [f"person {number}" for number in persons],
    )


def _pool(
    series: list[ndarray],
    exercise: ndarray,
    groups: ndarray,
    spans: ndarray,
) -> SamplePool:
    def read(index: ndarray) -> ndarray:
        samples = np.empty((len(index), *SHAPE), np.float32)
        for place, (recording, begin, end) in enumerate(spans[index]):
            samples[place] = series[recording][begin:end].T
        return samples

    return SamplePool(
        exercise[spans[:, 0]],
        read,
        groups[spans[:, 0]],
        spans,
    )
