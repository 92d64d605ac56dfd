"""Methods that with some arguments are another method, bit for bit: every client's model after each
of its rounds, running statistics included."""

import pytest
from classes import (
    APFL,
    CFL,
    FPL,
    IFCA,
    KAPC,
    KTPFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAlign,
    FedAMP,
    FedAPA,
    FedAS,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedCAC,
    FedDF,
    FedEM,
    FedGen,
    FedHKD,
    FedMD,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedTGP,
    FedU,
    FeSEM,
    HeurFedAMP,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedGraph,
    TopKPFD,
)
from every import NAMES, method_of
from reckoning import KEPT, PlainMean
from refusals import refuses
from watching import same, trained

FEW = {"samples": 40, "batch_size": 16}
TINY = {"generator_steps": 2, "hidden": 8, "noise": 4}
PART = {"participation": 0.5}
ALL = {"data": {"public": "held_back", "fraction": 0.4}}
FUSED = FedDF(steps=5, **FEW)
SMALL = {"net": "norm", "evaluation": {"judge": "after"}, "data": {"fraction": 0.4}}
IDENTITIES = [
    (FedAvg(), Local(), [], {"clients": 1}),
    (FedProx(mu=0.0), FedAvg(), [], PART),
    (FedBN(), FedAvg(), [], {"net": "plain"}),
    (FedBABU(), FedRep(head_epochs=0), [], PART | KEPT),
    (FedEM(components=1), FedAvg(), [], PART | {"optimizer": {"momentum": 0.9}}),
    (FedAMP(lam=0.0), Local(), [], PART),
    (KAPC(lam=0.0), Local(), [], PART),
    (HeurFedAMP(lam=0.0), Local(), [HeurFedAMP()], {}),
    (PerFedAvg(alpha=0.0), PlainMean(), [PerFedAvg()], PART),
    (PerFedAvg(alpha=0.0, variant="hf"), PlainMean(), [PerFedAvg(variant="hf")], PART),
    (
        FedAS(align_epochs=0, weighting="samples"),
        FedPer(),
        [FedAS(weighting="samples"), FedAS(align_epochs=0)],
        PART,
    ),
    (FedCAC(tau=0.0), FedAvg(), [FedCAC()], PART | {"clients": 5}),
    (FedCAC(), Local(), [], {"clients": 1}),
    (LGFedAvg(9), FedAvg(), [LGFedAvg(0)], {"participation": 0.75}),
    (LGFedAvg(0), Local(), [], {"participation": 0.75}),
    (FedProto(lam=0.0), Local(), [FedProto(lam=1.0)], {}),
    (FedTGP(lam=0.0, server_epochs=2), Local(), [FedTGP(server_epochs=2)], {}),
    (FedHKD(lam=0.0, gamma=0.0), FedAvg(), [FedHKD(nu=0.0, sigma=0.0)], {}),
    (IFCA(1, "samples"), FedAvg(), [], {"participation": 0.75}),
    (IFCA(1), PlainMean(), [], {"participation": 0.75}),
    (FeSEM(1), PlainMean(), [], {}),
    (FeSEM(4), Local(), [], {}),
    (FedMD(epochs=0, **FEW), Local(), [FedMD(**FEW)], ALL),
    (FedMD(lam=0.0, **FEW), Local(), [], ALL),
    (FedDF(steps=0), FedAvg(), [FUSED], ALL | PART),
    (FedDF(steps=0), FedAvg(), [FUSED], ALL | {"net": {"plain": 2, "norm": 2}}),
    (KTPFL(step=0.0, **FEW), FedMD(loss="kl", **FEW), [], ALL),
    (TopKPFD(k=4, **FEW), FedMD(loss="kl", **FEW), [], ALL),
    (FedAPA(eta=0.0), Local(), [], {}),
    (FedAPA(eta=0.0, classifier="mixed"), Local(), [], {}),
    (FedU(gamma=0.0), Local(), [], {}),
    (PFedGraph(0.0, 0.0), Local(), [], {}),
    (FedAvgM(momentum=0.0), FedAvg(), [], {}),
    (CFL(eps1=0.0, eps2=0.0, first_round=1), FedAvg(), [], {"participation": 0.75}),
    (CFL(eps1=1e9, eps2=0.0, first_round=4), FedAvg(), [], {"participation": 0.75}),
    (MOON(mu=0.0), FedAvg(), [], PART),
    (FedAlign(mu=0.0), FedAvg(), [], PART),
    (FedGen(alpha=0.0, beta=0.0, **TINY), FedAvg(), [], PART),
    (Ditto(lam=0.0), FedAvg(), [], PART | {"optimizer": {"momentum": 0.9}}),
    (Ditto(lam=1.0), FedAvg(), [], PART | {"optimizer": {"momentum": 0.9}}),
    (APFL(), FedAvg(), [], PART),
    (APFL(alpha=0.9, adaptive=False), FedAvg(), [], PART),
    (FedALA(eta=0.0), FedAvg(), [], PART),
    (FedALA(), Local(), [], {"clients": 1}),
]


@pytest.mark.sampled("[KAPC", "[FedHKD", "[KTPFL", "[FedALA(eta", "[CFL(eps1=0", "[Ditto(lam=0")
@pytest.mark.parametrize("ours, theirs, unlike, changes", IDENTITIES, ids=repr)
def test_it_is_the_other_method(federation, ours, theirs, unlike, changes):
    changes = SMALL | {"rounds": 3} | changes
    wanted = trained(federation, theirs, **changes)
    assert same(trained(federation, ours, **changes), wanted)
    assert not any(same(trained(federation, method, **changes), wanted) for method in unlike)


@pytest.mark.sampled("MOON")
@pytest.mark.parametrize(
    "ours, theirs, momentum",
    [
        (MOON(mu=5.0), FedAvg(), 0.0),
        (FedALA(), FedAvg(), 0.0),
        (FPL(), FedAvg(), 0.0),
        (FedGen(**TINY), FedAvg(), 0.0),
        (FedHKD(nu=0.0, sigma=0.0), FedAvg(), 0.0),
        (SCAFFOLD(), PlainMean(), 0.0),
        (SCAFFOLD(), PlainMean(), 0.9),
    ],
    ids=repr,
)
def test_its_first_round_is_the_other_methods(federation, ours, theirs, momentum):
    changes = SMALL | {"optimizer": {"momentum": momentum}}
    one, other = (trained(federation, method, **changes) for method in (ours, theirs))
    assert same(one[:4], other[:4]) and not same(one[4:], other[4:])


@pytest.mark.sampled("knnper", "fedgen")
@pytest.mark.parametrize("name", [n for n in NAMES if method_of(n).traits.classes])
def test_what_is_about_classes_refuses_a_regression(federation, name):
    regression = {"task": "regression", "public": "held_back", "validation": 0.2}
    with refuses("regression"):
        federation(method_of(name), data=regression).prepare()
