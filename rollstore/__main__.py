"""`python -m rollstore` is `rollstore`."""

from rollstore.cli import main

main()
