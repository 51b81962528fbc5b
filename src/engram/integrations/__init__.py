"""Engram in other libraries and in files of its users, one module for each; `import engram` imports none of them."""
