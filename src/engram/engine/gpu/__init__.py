"""How a GPU trains a stack."""
