"""LoRA adapters: their files, which of them are in memory, and what they add to the layers of a network."""
