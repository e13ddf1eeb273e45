"""Statistics, metrics, traces, and the logs of access and audit. Knows no frontend."""
