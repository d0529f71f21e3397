"""Audits of stated privacy: lower bounds from what was published, with canaries that the auditor knows."""
