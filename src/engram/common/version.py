"""The version of Engram, kept in every result."""

__version__ = "0.1.0"
