"""``python -m optuna_fleet``: the command line."""

import sys

from optuna_fleet.cli import main

sys.exit(main())
