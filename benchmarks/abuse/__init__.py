"""What well-behaved clients notice while others use the server's limits to the full."""
