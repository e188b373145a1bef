"""`python -m onecopy` is the `onecopy` command."""

from __future__ import annotations

import sys

from onecopy.cli import main

if __name__ == "__main__":
    sys.exit(main())
