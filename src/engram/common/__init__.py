"""Errors, files, seeds and registries, which all other rooms use."""
