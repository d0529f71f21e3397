"""The command line: `roundtable COMMAND`."""
