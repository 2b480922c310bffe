"""`python -m saccade` is `saccade`."""

from saccade.cli import main

main()
