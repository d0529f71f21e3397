"""The silo's agent: one connection, the steps that it is asked for, and what it keeps of them."""
