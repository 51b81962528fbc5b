"""One page that can be read anywhere: a run, or a whole reproduction, as self-contained HTML."""

from engram.reproduction.write import write_report

__all__ = ["write_report"]
