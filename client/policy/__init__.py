"""The silo's own files: what it offers, what it allows, whom it knows."""
