"""What the server asks of the machine: memory, garbage collection, GPUs."""
