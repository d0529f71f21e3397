"""Reads the silo's own files: its tasks and settings, its rules, the jobs and peers that it knows."""
