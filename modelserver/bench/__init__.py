"""`modelserver bench`: a load generator in the manner of perf_analyzer, and what it makes of its measurements."""
