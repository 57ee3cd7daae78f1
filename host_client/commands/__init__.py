"""What each command of `podpipe` does: `(settings, arguments)` in, an exit code out.

Only these write to stdout; what they know of the arguments is `cli`'s parser.
"""
