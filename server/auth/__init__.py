"""Who may call what, who may join, and what is written down about it."""
