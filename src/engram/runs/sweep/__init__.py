"""Sweeps: many settings of some methods on one benchmark; the worst are dropped early, and the best is found."""
