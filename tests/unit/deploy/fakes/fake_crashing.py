"""A process that never comes to serve."""

import sys

sys.exit(3)
