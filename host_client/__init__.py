"""The host side of podpipe: lifecycle through kubectl, tools through a pipe into each pod."""

__version__ = "0.1.0"
