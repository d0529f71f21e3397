"""Rows of updates in column blocks: in memory or in files, their inner products and their sums."""
