"""`modelserver bench`: a load generator in the manner of perf_analyzer, with reports of its measurements."""
