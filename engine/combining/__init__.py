"""From what a round has received to its new model: rows, a mean, or the means of groups."""
