"""What the command line offers for a silo's cluster: plans, verification, profiles, scaling."""
