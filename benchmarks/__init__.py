"""Side-by-side measurements of everything that the project promises; `python -m benchmarks` runs them."""
