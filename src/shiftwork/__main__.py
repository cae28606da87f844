"""`python -m shiftwork` is the `shiftwork` command."""

from shiftwork.cli import main

main(prog_name="shiftwork")
