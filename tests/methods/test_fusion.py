"""FedDF and pFedDF: the server distils clients' models on public data (cards 1.15 and 1.16)."""

import pytest
import torch
from classes import FedAvg, FedDF
from reckoning import tensors_of
from refusals import refuses
from torch.testing import assert_close
from watching import Nets, global_model, models, module_of, server_of

from fl_lightning.methods import feddf
from fl_lightning.methods.common import predictions as public

PUBLIC = {"data": {"public": "held_back"}}
SMALL = {"samples": 40, "batch_size": 16, "steps": 5}


def scores(fed, vector, x):
    """Of a model on x, in evaluation mode."""
    module = module_of(fed)
    module.binding.bind(vector, fed.run.groups[0].initial_buffers)
    module.model.eval()
    with torch.no_grad():
        found = module.model(x)
    return found


@Nets
def test_a_student_that_equals_its_teachers_stays(federation, net):
    """INV2: in evaluation mode the loss has no slope, whatever the normalisation. (Adam's further
    steps would blow up what rounding leaves of it.)
    """
    fed = federation(
        FedDF(**SMALL | {"steps": 1}), net=net, precision="64-true", local_epochs=0, **PUBLIC
    )
    fed.round(1)
    assert_close(global_model(fed), fed.run.groups[0].initial, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ensemble", ["scores", "probabilities"])
def test_the_step_is_down_the_kl_from_the_mean_of_all(federation, ensemble):
    """INV4: one full step by hand, with the teacher first: sum t log(t / s)."""
    method = FedDF(samples=40, batch_size=40, steps=1, server_lr=0.01, ensemble=ensemble)
    fed, plain = (federation(m, precision="64-true", **PUBLIC) for m in (method, FedAvg()))
    fed.round(1), plain.round(1)
    x = public.public_subset(fed.run, 1, 40)
    z = torch.stack([scores(plain, w, x) for w in models_of_round(federation)])
    teacher = z.mean(0).softmax(1) if ensemble == "scores" else z.softmax(2).mean(0)
    start = global_model(plain).clone()
    leaf = start.clone().requires_grad_()
    tensors = tensors_of(plain.run.groups[0].layout, leaf)
    student = torch.func.functional_call(module_of(plain).model.eval(), tensors, x).softmax(1)
    loss = (teacher * (teacher / student).log()).sum(1).mean()
    [gradient] = torch.autograd.grad(loss, leaf)
    assert gradient.norm() < feddf.CLIP
    expected = start - 0.01 * gradient / (gradient.abs() + 1e-8)  # Adam's first step
    assert_close(global_model(fed), expected, rtol=0, atol=1e-9)


def models_of_round(federation):
    """What FedAvg's clients upload in the first round."""
    fed = federation(FedAvg(), precision="64-true", evaluation={"judge": "after"}, **PUBLIC)
    fed.round(1)
    return models(fed)


def test_all_architectures_teach_each(federation):
    """A student learns from those that it cannot be averaged with; scores come in the order of
    clients."""
    fed = federation(FedDF(**SMALL), net={"plain": 2, "norm": 2}, **PUBLIC)
    seen = []
    distil = FedDF.distil

    def watched(method, group, x, teacher, steps):
        seen.append(teacher)
        return distil(method, group, x, teacher, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDF, "distil", watched)
        fed.round(1)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    assert_close(seen[0].sum(1), torch.ones(40))


def test_feddf_wants_public_data_and_classes(federation):
    with refuses(r"^data\.public="):
        federation(FedDF()).prepare()


def test_who_has_not_answered_teaches_nothing(federation):
    fed = federation(FedDF(**SMALL), participation=0.5, **PUBLIC)
    fed.round(1)
    server = server_of(fed, [0, 2])
    server.collect([2], {})
    for c in (0, 2):
        fed.pool.state(c)
    assert list(feddf.scores_of(server.only, public.public_subset(fed.run, 1, 40))) == [2]
