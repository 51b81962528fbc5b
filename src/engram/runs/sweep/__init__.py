"""Sweeps: many settings of a method on one benchmark, of which the best is sought and the worst are given up early."""
