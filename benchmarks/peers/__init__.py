"""Other libraries' attention over the inputs of our benchmark cases: ``python -m benchmarks.peers``."""
