"""Tables of a silo: what their columns are, how they are read, and in what they differ from a study's."""
