"""What `roundtable doctor` asks of a machine, of a silo's settings and of a coordinator's."""
