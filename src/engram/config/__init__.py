"""The settings of a run, and the paper's values of them."""
