"""`python -m attnconv` is `attnconv`."""

from attnconv.cli import main

main()
