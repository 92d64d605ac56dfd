"""The packages: those in fl_lightning/, and the folders beside it that are installed as subpackages
of it."""

from setuptools import find_packages, setup

BESIDE = ("callbacks", "configs", "slurm")

setup(
    packages=sorted(
        {*find_packages(include=["fl_lightning*"]), *(f"fl_lightning.{name}" for name in BESIDE)}
    ),
    package_dir={f"fl_lightning.{name}": name for name in BESIDE},
)
