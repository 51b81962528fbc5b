"""How a CPU trains a stack."""
