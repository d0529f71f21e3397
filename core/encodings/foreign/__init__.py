"""Encodings that are code of others: found, tried, checked as they work, and approved by who runs them."""
