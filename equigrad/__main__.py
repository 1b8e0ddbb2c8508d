"""``python -m equigrad``: the same as the ``equigrad`` command."""

import sys

from equigrad.cli import main

sys.exit(main())
