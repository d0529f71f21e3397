"""Reads projects of other frameworks, without running them, and writes what they need to run here."""
