"""What our methods' uploads hold beside models, all in one place: see `core.beside`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_lightning.core import Beside

Entries = dict[str, Beside]

COUNTS: Entries = {
    "classes": Beside("counts", "which classes the client has", "classes"),
    "counts": Beside("counts", "samples of each class", "class_counts"),
}


def _means(method: Any) -> Entries:
    return COUNTS | {
        name: Beside("class_means", f"mean {name} of each class", "rows") for name in method.names
    }


def _moments(method: Any) -> Entries:
    return _means(method) | {
        "moments.means": Beside(
            "class_means", "mean features of each class times the class's share", "rows"
        ),
        "moments.V": Beside("variance", "variance of features", "nonnegative"),
    }


def _predictions(method: Any) -> Entries:
    values: Any = "shares" if method.loss == "kl" else "real"
    return {"predictions": Beside("predictions", "class scores of public samples", values)}


def _basis(method: Any) -> Entries:
    basis = Beside(
        "basis",
        "a basis of the client's samples, from which the server computes the relation",
        None,
        True,
    )
    return {"basis": basis} if method.similarity == "subspace" else {}


_DECLARED: dict[str, Callable[[Any], Entries]] = {
    "ClassMeans": _means,
    "FedPAC": _moments,
    "FedMD": _predictions,
    "FEDORA": _basis,
    "CrossKAPC": lambda _: {
        "step": Beside(
            "step_norms",
            "squared norms of the client's first step by layer",
            "nonnegative",
            once=True,
        ),
        "noise": Beside(
            "noise_norms", "variance of the client's step by layer", "nonnegative", once=True
        ),
        "losses": Beside("losses", "the client's losses in a trial of groups", None, once=True),
    },
    "DBE": lambda _: {
        "mean": Beside("mean_feature", "mean feature of the client's data", once=True)
    },
    "FedAS": lambda _: {
        "fisher": Beside("fisher", "trace of the Fisher information", "nonnegative")
    },
    "FedCAC": lambda _: {
        "critical": Beside("critical", "a bit for each number that matters to the client", None)
    },
    "FLAYER": lambda _: {
        "kept": Beside("kept", "a bit for each number: whether it was uploaded", None)
    },
    "FedFomo": lambda _: {
        "candidates": Beside("candidates", "whose models the client has tried", "public"),
        "gains": Beside(
            "gains", "a relation that the client computes: what each model is worth to it", None
        ),
    },
    "FedGen": lambda _: {"labels": Beside("counts", "samples of each class", "counts")},
    "FedNova": lambda _: {"steps": Beside("steps", "local steps", "public")},
    "IFCA": lambda _: {
        "cluster": Beside("cluster", "which of the global models suits the client best", None)
    },
    "PartialPooling": lambda _: {
        "hessians": Beside("moments", "second moments of the client's features", None),
        "targets": Beside("moments", "moments of its features and targets", None),
        "losses": Beside("losses", "the client's losses on samples set apart", None),
    },
    "PFedFDA": lambda _: {
        "means": Beside("gaussians", "mean feature of each class"),
        "covariance": Beside("gaussians", "covariance of features", "covariance"),
    },
    "SelfKAPC": lambda _: {
        "step": Beside("step_norms", "squared norms of the client's step by layer", "nonnegative"),
        "noise": Beside(
            "noise_norms", "variance of the client's step by layer", "nonnegative", once=True
        ),
    },
}

DOWNLOADS = {
    "ClassMeans": "class means of all",
    "CrossKAPC": "the share of noise in its step by layer",
    "DBE": "mean feature of all",
    "FedFomo": "models of other clients",
    "FedGen": "a generator, class counts of all",
    "FPL": "class means of clusters of clients",
    "FedMD": "a mix of predictions",
    "FedTGP": "prototypes that the server has learned",
    "IFCA": "the models of all clusters",
    "PartialPooling": "weights of linear models that all share",
    "PFedFDA": "Gaussians of all",
    "PFedGraph": "its own mix beside its model",
    "SCAFFOLD": "the mean control variate",
}
"""What clients receive beside one model, in words, by class."""

RECEIVED = {
    "Clustered": "the mean of its cluster's models",
    "FedCAC": "the mean of models, and of those like its own",
    "PFedHN": "a model that the server's hypernetwork makes",
}
"""What model clients receive, in words, by class, where scope and relation do not say it."""


def of_class(method: Any, table: Any, otherwise: Any) -> Any:
    """The entry of the first of our classes that one of our methods is, by the class's name."""
    ours = (
        cls for cls in type(method).__mro__ if cls.__module__.startswith("fl_lightning.methods.")
    )
    return next((table[cls.__name__] for cls in ours if cls.__name__ in table), otherwise)


def declared(method: Any) -> Entries:
    """The entries of one of our methods, by name."""
    entries: Entries = of_class(method, _DECLARED, lambda _: {})(method)
    return entries


def downloads(method: Any) -> str:
    """What its clients receive beside one model, in words; empty: nothing."""
    words: str = of_class(method, DOWNLOADS, "")
    return words


def received(method: Any) -> str:
    """What model its clients receive, in words; empty: scope and relation say it."""
    words: str = of_class(method, RECEIVED, "")
    return words
