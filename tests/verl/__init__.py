"""verl 0.9.1, unmodified, on CPU, with the small harness of `bench.verl`. Only `scripts/test-verl` runs it."""
