"""`python -m saccade` is `saccade`."""

from saccade_cli import main

main()
