"""The fixtures of the daemon's tests that a browser's need too."""

from tests.in_pod_server.conftest import short_module_path

__all__ = ["short_module_path"]
