"""Batch scripts that ship with the package."""
