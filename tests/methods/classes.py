"""The classes of all methods: `from classes import Ditto, KAPC`."""

from importlib import import_module

from fl_lightning.configuration import catalogue

for entry in catalogue.table("methods").values():
    module, _, name = entry.class_path.rpartition(".")
    globals()[name] = getattr(import_module(module), name)
