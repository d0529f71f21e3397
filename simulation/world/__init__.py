"""What a simulation makes up: clients, their data, devices, dropouts and attackers."""
