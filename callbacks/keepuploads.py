"""A copy of each client's last upload at the server, for methods that would not keep one."""

from fl_lightning.callbacks.base import Transform


class KeepUploads(Transform):
    """Keep each client's last upload at the server until the run has ended, for `fl-train audit`.

    Messages do not change. The server stores one more vector for each client, and checkpoints grow.
    """

    # The server keeps a copy apart from the client's own model wherever a transform may make the
    # two differ.
    changes_upload = further_vectors = True
