"""The server's copy of each client's last upload, for methods that would not keep one."""

from fl_lightning.callbacks.base import Transform


class KeepUploads(Transform):
    """Keep each client's last upload at the server until the run has ended, so that `fl-train
    audit` can look at it.

    Nothing that travels changes. The server takes one vector more for each client, and checkpoints
    are longer.
    """

    # The server keeps a copy apart from the client's own model wherever a transform may make the
    # two differ.
    changes_upload = further_vectors = True
