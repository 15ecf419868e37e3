"""An agent that is started by hand, perhaps before its driver: ``FILE OPTIONS``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from optuna_fleet.cli import main

if __name__ == "__main__":
    while not (file := Path(sys.argv[1])).exists() or not file.stat().st_size:
        time.sleep(0.05)
    sys.exit(main(["agent", "--join", *sys.argv[1:]]))
