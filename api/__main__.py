"""`python -m roundtable` is `roundtable`."""

from roundtable.cli.main import main

main()
