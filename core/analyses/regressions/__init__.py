"""Regressions over the rows of all silos, fitted to summed likelihoods, gradients and Hessians."""
