"""Response stores for equal requests: in this process, or in Redis. The package knows no models and no protocols."""
