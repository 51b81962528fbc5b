"""How fast this machine trains: floors, plain loops, Engram's stacks and Avalanche's strategies, side by side."""
