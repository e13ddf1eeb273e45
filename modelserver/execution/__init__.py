"""A loaded version: its instances, the workers that drive them, batches in and responses out."""
