"""Personalised federated learning on Lightning Fabric: who learned what from whom."""

__version__ = "0.1.0"
