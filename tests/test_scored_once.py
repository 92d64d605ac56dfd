"""No model is scored twice on one part of the data, and no score is ever that of another model."""

import pytest
from classes import IFCA, KAPC, MOON, Ditto, FedAvg, FedBN, FedRoD

from fl_lightning.callbacks.compression import Quantize, TopK
from fl_lightning.engine import scoring

TIMES = ("seconds", "memory")


@pytest.fixture
def scored(monkeypatch):
    """Kind and client of all that is scored, in order."""
    models = []
    score = scoring.score

    def noted(kind, client, part, *seen):
        models.append((kind, client.id))
        return score(kind, client, part, *seen)

    monkeypatch.setattr(scoring, "score", noted)
    return models


@pytest.mark.parametrize(
    "method, rounds",
    [
        (FedAvg(), [["before", "after", "global"], ["after", "global"]]),
        (KAPC(), [["before", "after"], ["after"]]),
        (Ditto(), [["before", "after", "global"], ["after", "global"]]),
        # outputs of its own
        (FedRoD(), [["before", "after", "global"], ["before", "after", "global"], ["after"]]),
    ],
)
def test_what_was_scored_is_not_scored_again(federation, scored, method, rounds):
    fed = federation(method, net="norm")
    for t, kinds in enumerate(rounds[:2], 1):
        scored.clear()
        fed.round(t)
        assert sorted(scored) == sorted((kind, c) for kind in kinds for c in range(4))
    scored.clear()
    fed.evaluator.everyone()
    assert {kind for kind, _ in scored} == set(*rounds[2:])


SETTINGS = {
    "fedavg": (FedAvg(), {}),
    "fedbn": (FedBN(), {"net": "norm", "participation": 0.5}),
    "ditto": (Ditto(), {"participation": 0.5, "evaluation": {"every": 2}}),
    "kapc": (KAPC(), {"participation": 0.5, "callbacks": [Quantize()]}),
    "kapc from the server": (KAPC(start="server"), {"fabric": {"bank": "disk"}}),
    "moon": (MOON(), {"participation": 0.75}),
    "ifca": (IFCA(clusters=2), {"participation": 0.75}),
    "topk": (FedAvg(), {"callbacks": [TopK()], "participation": 0.75}),
    "drift": (
        FedAvg(),
        {"data": {"partition": "iid", "planted": "labels", "groups": 2, "drift_every": 1}},
    ),
    "everything": (
        FedAvg(),
        {
            "data": {
                "global_test": True,
                "client_test": 0.25,
                "test_fraction": 1.0,
                "validation": 0.2,
            },
            "evaluation": {
                "models": ["before", "after", "global", "finetuned"],
                "judge": "before",
                "metrics": ["f1", "class_share_accuracy"],
            },
        },
    ),
}


@pytest.mark.sampled("everything", "drift")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_is_that_of_scoring_anew(federation, name):
    method, settings = SETTINGS[name]
    ends = []
    for remembers in (True, False):
        fed = federation(method, **settings, rounds=4)
        fed.prepare()
        fed.evaluator.cache.enabled &= remembers
        rows = []
        for t in range(1, 5):
            record = fed.round(t)
            rows += [
                record.clients,
                {k: v for k, v in record.metrics.items() if not k.startswith(TIMES)},
            ]
        ends.append(repr([rows, fed.evaluator.everyone()]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("change", ["weight", "buffer", "data", "client", "nothing"])
def test_another_model_or_other_data_have_a_score_of_their_own(federation, scored, change):
    fed = federation(FedAvg(), net="norm")
    evaluator = fed.evaluator
    client = evaluator.at_rest(0)
    vector = client["model"].clone()
    evaluator.scores(evaluator.cache.model("before", client, vector))
    scored.clear()
    if change == "weight":
        vector[-1] += 1e-6
        vector.data[fed.run.groups[0].layout.blocks[0].start] += 1e-6
    elif change == "buffer":
        client.state.buffers = [b + 1 for b in client.state.buffers]
    elif change == "data":
        fed.run.data._cache.clear()
    elif change == "client":
        client = evaluator.at_rest(1)
    evaluator.scores(evaluator.cache.model("global", client, vector))
    assert scored == ([] if change == "nothing" else [("global", client.id)])
