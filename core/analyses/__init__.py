"""Analyses: what silos count and add up of their tables, and what follows from the sums.

A round of an analysis is: from public numbers and its own rows a silo computes a vector of sums; the sums of
all silos are added up; the next public numbers follow. All of it is pure arithmetic, the same at every party.
"""
