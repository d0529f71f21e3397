"""Workers on blocks of columns: processes beside this one, or actors of a Ray cluster."""
