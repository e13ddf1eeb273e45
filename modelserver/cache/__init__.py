"""Where answers are kept for equal requests: in this process, or in a Redis server. Knows no models and no protocol."""
