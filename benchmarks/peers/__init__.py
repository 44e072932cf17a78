"""The servers that the benchmarks compare: how each is set up, started and asked."""
