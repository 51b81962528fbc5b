"""Rehearsal: reference methods that repeat earlier tasks, stored, made up or generated, while a new one is learned."""

from engram.rehearsal.rehearsal import Batch, Moment, Rehearsal

__all__ = ["Batch", "Moment", "Rehearsal"]
