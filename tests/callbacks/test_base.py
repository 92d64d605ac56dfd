"""What a callback may be: hooks of another kind, or misspelt ones, are an error and not silence."""

import pytest

from fl_lightning.callbacks import Aggregator, Callback, Observer, Relation, Transform
from fl_lightning.callbacks.base import in_order
from fl_lightning.callbacks.checkpoint import Checkpoint
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.callbacks.progress import Progress


@pytest.mark.parametrize(
    "base, hook",
    [
        (Callback, "on_round_end"),
        (Observer, "on_upload"),
        (Transform, "on_round_end"),
        (Relation, "on_round_start"),
        (Aggregator, "on_download"),
        (Observer, "on_rond_end"),
        (Transform, "init_server"),
        (Observer, "init_server"),
        (Observer, "init_client"),
        (Relation, "init_client"),
    ],
)
def test_a_hook_that_nobody_would_call_is_an_error(base, hook):
    with pytest.raises(
        TypeError, match=rf"Own\.{hook} would never be called: {base.__name__} has no such hook"
    ):
        type("Own", (base,), {hook: lambda *args: None})


def test_a_class_may_be_of_two_kinds():
    class Both(Transform, Observer):
        def on_fit_start(self, run): ...
        def on_upload(self, client, payload): ...
        def on_round_end(self, run, record): ...

    assert issubclass(Both, Callback)


def test_stages_decide_the_order_whatever_the_configuration_names_first():
    class Mine(Observer):
        pass

    class Late(Observer):
        stage = "send"

    own, sends = Mine(), Late()
    hung, logger = [Checkpoint(), Progress(), sends, Heatmaps(), own], Mine()
    order = in_order(hung, [logger])
    assert [type(c) for c in order] == [Mine, Heatmaps, Progress, Mine, Checkpoint, Late]
    assert order[0] is own and order[3] is logger
    with pytest.raises(
        TypeError, match=r"Odd\.stage is 'later', which is not one of observe, draw"
    ):
        type("Odd", (Observer,), {"stage": "later"})
