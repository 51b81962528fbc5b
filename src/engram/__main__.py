"""`python -m engram`."""

from engram.cli.main import main

main()
