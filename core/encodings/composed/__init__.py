"""Encodings that are made of others: part by part of a vector, or around a whole chain."""
