"""Questions in which silos' sums have places of their own, so that each silo's, or each group's, is known."""
