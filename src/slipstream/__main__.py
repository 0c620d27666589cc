"""``python -m slipstream`` is the ``slipstream`` command."""

import sys

from slipstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
