"""`python -m scalelong`, and `torchrun -m scalelong train …` on several processes."""

from scalelong.cli.main import main

main()
