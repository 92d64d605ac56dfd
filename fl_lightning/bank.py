"""Where clients' rows lie: in memory, or in files that are mapped into it, for more models than the memory holds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.errors import BadInput
from fl_lightning.files import writing


class Bank:
    """Gives out rows that outlive a turn.

    On disk every row is a file of `folder` that has no name any more: the system writes its pages out when it needs the
    memory, reads them back when they are touched, and frees the space with the process, however that ends.

    Args:
        folder: for the files; None: rows lie in memory.
        device: of the rows.

    Raises:
        BadInput: rows of a GPU cannot be mapped files.
    """

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        if folder is not None and device.type != "cpu":
            raise BadInput("fabric.bank", "disk", f"rows lie on the {device.type} device: memory")
        self.folder = folder

    def keep(self, row: Tensor) -> Tensor:
        """A copy of `row` (D,) in the bank; what is written to it stays.

        Raises:
            RunFailed: the disk is full.
        """
        if self.folder is None:
            return row.clone()
        with writing(self.folder):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".row-")
            try:
                if hasattr(os, "posix_fallocate"):  # else a full disk kills the process when it writes
                    os.posix_fallocate(handle, 0, max(1, row.nbytes))
                kept = torch.from_file(name, shared=True, size=row.numel(), dtype=row.dtype)
            finally:
                os.close(handle)
                os.unlink(name)
        return kept.copy_(row)
