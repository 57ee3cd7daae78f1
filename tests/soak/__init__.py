"""A soak: mixed calls under random faults, and a judge that believes no ending without evidence.

`tally` is what happened and whether it was as claimed, `faults` breaks things, `workload` makes the
calls, `soak` runs both at once, and `__main__` is `scripts/bench soak`.
"""
