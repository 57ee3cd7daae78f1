"""`python -m host_client` is `podpipe`."""

import sys

from host_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
