"""One page that can be read anywhere: a run as self-contained HTML."""
