"""Runs: what is trained, what it leaves in a folder, and what is read back from there."""
