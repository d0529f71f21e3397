"""Gradient-boosted trees over the rows of all silos: histograms of gradients are summed, trees follow.

The objective, the gain of a split, the order in which splits are tried and the directions of missing values
are those of xgboost's tree method "hist" (Chen & Guestrin 2016, and its sources as of 3.2).
"""
