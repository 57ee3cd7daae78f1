"""What runs inside a sandbox pod: a daemon that owns processes, files and the home, and `dial`."""

__version__ = "0.1.0"
