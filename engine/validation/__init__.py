"""What a job asks for, checked as a whole before round 1."""
