"""The silo's own page: for its people, on its own machine."""
