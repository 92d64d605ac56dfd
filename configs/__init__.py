"""Configurations that ship with the package."""
