"""What travels between the processes of a fleet, and how."""
