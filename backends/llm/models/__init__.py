"""Networks that the engine runs, and the checkpoints that they are read from."""
