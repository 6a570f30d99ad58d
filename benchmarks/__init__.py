"""How fast, and what it costs: `python -m benchmarks.throughput`, `python -m benchmarks.scaling`."""
