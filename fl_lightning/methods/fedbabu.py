"""FedBABU: Oh, Kim, Yun: FedBABU: Towards Enhanced Representation for Federated Image
Classification. ICLR 2022."""

from dataclasses import dataclass

from fl_lightning.methods import Client, OwnClassifier, Payload, Phase, Phases, Rule, Traits


@dataclass(frozen=True)
class FedBABU(OwnClassifier):
    """FedAvg of the body alone, with the initial classifier fixed; after the last round clients
    fine-tune the whole model.

    Scored: a copy of body and initial classifier after fine-tuning (`evaluation.finetune_epochs`);
    as `global`: body and initial classifier without it. The mean is by samples, as FedAvg's (the
    authors' code: plain).
    """

    traits = Traits(
        family="partial sharing",
        judge="finetuned",
        still=True,
        newcomers=Rule("global body and first classifier, fine-tuned as a whole"),
    )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that trains the body. The classifier is left out of the optimiser, whose
        weight decay or momentum would change it."""
        return [Phase(trains=client.mask(lambda b: not b.head))]

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that fine-tunes the whole model, as clients do after the last round."""
        return [Phase(purpose="finetune")]
