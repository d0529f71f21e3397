"""Tables of the job file that have a module each: `core/config.py` puts them together."""
