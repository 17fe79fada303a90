"""``python -m fsdpcheck``: the same as the command ``fsdpcheck``."""

from __future__ import annotations

import sys

from fsdpcheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
