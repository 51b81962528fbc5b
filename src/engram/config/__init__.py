"""The settings of an experiment, and the paper's values for them."""
