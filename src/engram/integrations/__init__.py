"""Engram inside other people's libraries, a module for each; none is imported with Engram itself."""
