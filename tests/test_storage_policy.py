"""The storage policy against what the engine has in memory after a real run, for all that the
project ships."""

import pytest

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.parallel import one_process
from fl_lightning.run import assemble, instantiate
from fl_lightning.storage.state import MODEL

COMMON = (
    "--config kapc_exact_digits --loggers null --fabric.accelerator cpu --callbacks null "
    "--federation.clients 6"
)
COMMON += (
    " --federation.rounds 2 --federation.local_epochs 1 --data.min_samples 5 --data.fraction 0.3"
)
COMMON += " --data.validation 0.2 --data.partition iid --data.public held_back"
ARGUMENTS = {
    "fedamp": "--method.alpha 0.02",
    "ifca": "--method.clusters 1",  # of several one may stay the initial model, which nobody takes
    "ktpfl": "--method.samples 8",
    "fedmd": "--method.samples 8",
    "simpfd": "--method.samples 8",
    "topkpfd": "--method.samples 8",
    "feddf": "--method.steps 2",
    "pfeddf": "--method.steps 2",
    **dict.fromkeys(("fedsalora", "ffalora"), "--model.adapters.rank 2"),
}
CALLBACKS = {
    "attack": "--callbacks.attack.kind sign_flip --callbacks.attack.share 0.3",
    "trimmedmean": "--callbacks.trimmedmean.share 0.2",
    "krum": "--callbacks.krum.attackers 1",
    "normbound": "--callbacks.normbound.bound 1.0",
    "blurrelation": "--callbacks.blurrelation.decimals 2",
    "canaries": "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
    "centralprivacy": "--callbacks.centralprivacy.clip 1 --callbacks.centralprivacy.noise 1",
    "localprivacy": "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1",
    "stepprivacy": "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1",
}
MAKES = {"crosskapc", "pfedhn", "fedfomo"}
"""Methods whose server makes each client's model anew, or sends others' or one as they are: no
vector to mix into."""
WATCHING = {"checkpoint", "heatmaps", "progress"}


def ran(words, folder):
    """The federation after two rounds."""
    config = resolve(layers_of_flags(read_flags(f"{COMMON} {words}".split())[1])[0])
    fabric = one_process("32-true")
    fabric.launch()
    fed = assemble(
        fabric,
        config,
        folder,
        [instantiate(f"callbacks.{k}", c) for k, c in config.callbacks.items()],
    )
    fed.prepare()
    for t in (1, 2):
        fed.round(t)
    return fed


def agree(fed):
    """What there is in memory is what the policy says."""
    run, policy = fed.run, fed.run.policy
    states = list(run.states.values())
    held = {
        "keeps_clients": bool(states),
        "keeps_received": any(s.received[MODEL] is not s.vectors[MODEL] for s in states),
        "keeps_optimizer": any(name.startswith("optimizer.") for s in states for name in s.memory),
    }
    assert held == {name: getattr(policy, name) for name in held}
    slots = run.method.slots().values()
    vectors = 1 + policy.keeps_received + len(slots) + sum(slot.exchanged for slot in slots)
    for state in states:  # vectors that share their memory count once
        assert len({id(v) for v in (*state.vectors.values(), *state.received.values())}) == vectors


@pytest.mark.sampled("[kapc", "[ditto")
@pytest.mark.parametrize("method", sorted(catalogue.table("methods")))
def test_what_each_method_keeps(method, tmp_path):
    fed = ran(f"--method {method} {ARGUMENTS.get(method, '')}", tmp_path)
    agree(fed)
    composed = bool(fed.run.groups[0].buffers) or method in MAKES
    assert composed == (not fed.run.policy.one_download and bool(fed.run.groups[0].down_mask.any()))


GLOBAL = ("centralprivacy", "krum", "median", "trimmedmean")
BESIDE = {"layerselection": ["kapc"], "blurrelation": ["kapc"]} | {
    callback: ["fedavg"] for callback in GLOBAL
}
"""Methods that these can stand beside; all others beside both."""
PAIRS = [
    (c, m)
    for c in catalogue.table("callbacks")
    if c not in WATCHING
    for m in BESIDE.get(c, ["fedavg", "kapc"])
]


@pytest.mark.sampled("layerselection", "quantize", "krum", "normbound")
@pytest.mark.parametrize("callback, method", PAIRS)
def test_what_each_callback_has_kept(callback, method, tmp_path):
    fed = ran(f"--method {method} --callbacks {callback} {CALLBACKS.get(callback, '')}", tmp_path)
    agree(fed)


@pytest.mark.parametrize("method", ["fedavg", "kapc"])
@pytest.mark.parametrize("keep", ["true", "false"])
def test_what_the_optimiser_has_kept(method, keep, tmp_path):
    fed = ran(f"--method {method} --optimizer.momentum 0.9 --optimizer.keep_state {keep}", tmp_path)
    agree(fed)
    assert fed.run.policy.keeps_optimizer == (keep == "true")
