"""Personalised federated learning on Lightning Fabric: who learned what from whom."""

from fl_lightning.later import put_off

__version__ = "0.1.0"

put_off()  # before anything imports Lightning
