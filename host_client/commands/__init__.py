"""What each command of `podpipe` takes and does: `(settings, arguments)` in, an exit code out.

Only these write to stdout.
"""
