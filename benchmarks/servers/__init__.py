"""The servers under comparison: ours, bare echoes, and peers in their own environments."""
