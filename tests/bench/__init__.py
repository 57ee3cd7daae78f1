"""`scripts/bench`: what podpipe costs beside what it replaces, as ratios of one run.

Absolute times belong to a machine; a ratio of two medians that were measured in turns, on the same
cluster in the same minutes, can be held to a target. A row (`harness.Row`) is a name, a target and
a context manager that sets up, gives the two sides, and takes down again.
"""
