"""Sweeps: many settings of some methods on one benchmark; the worst are given up early, and the best is found."""
