"""The user's own LightningDataModule, whose data sets yield (x, y), or (x, y, client) for natural
clients."""

import inspect

import numpy as np

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import arrays, given, loaders
from fl_lightning.data.source import Setting, Source
from fl_lightning.foundation.errors import BadInput, first_line


def load(data: DataConfig) -> Source:
    """Read all samples of the loaders for training and, if the module has one, for tests.

    A sample x is float or uint8, (channels, height, width), (channels, samples) or (features); or
    int64 (length), tokens that the module's attribute `vocabulary` counts. The loaders' batches and
    order are not used (data/loaders.py). A module with the parameter `root` gets `data.root`.

    Raises:
        BadInput: there is no such class, it raises an error, or its samples do not fit together.
    """
    from lightning import LightningDataModule

    name = data.source
    setting = Setting("data.source", name)
    try:
        cls = Component(name).load()
    except (ImportError, AttributeError) as error:
        raise setting.error(f"it cannot be imported ({error})") from error
    is_module = inspect.isclass(cls) and issubclass(cls, LightningDataModule)
    setting.check(is_module, "an import path must name a LightningDataModule")
    try:
        has_root = "root" in inspect.signature(cls).parameters
        module = cls(root=data.root) if has_root else cls()
        train, test = loaders.samples_of_module(setting, module, reads_test=data.reads_test)
    except BadInput:
        raise
    except Exception as error:  # a user's class can raise anything
        problem = f"its training and test data cannot be read: {first_line(error)}"
        raise setting.error(problem) from error
    parts = {"train": train}
    if test is not None and data.reads_test:
        parts["test"] = test
    content = given.of_samples(setting, module, parts)
    are_tokens = np.asarray(train[0][0]).dtype == np.int64
    requirement = (
        "its samples are whole numbers, tokens: give it the attribute vocabulary, their count"
    )
    setting.check("vocabulary" in content or not are_tokens, requirement)
    return arrays.as_source(setting, _by_size(content), data, has_test=test is not None)


def _by_size(content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turn clients' names that are whole numbers into numbers, so that 2 comes before 10."""
    names = content.get("client_train", np.zeros(0))
    if names.dtype.kind != "U" or not np.char.isdecimal(names).all():
        return content
    if not np.array_equal(names.astype(np.int64).astype(str), names):  # 07 is not 7
        return content
    keys = [key for key in ("client_train", "client_test") if key in content]
    return content | {key: content[key].astype(np.int64) for key in keys}
