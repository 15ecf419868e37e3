"""A warm bare training loop with a DataLoader: for each line `num_epochs`, train one model."""

from __future__ import annotations

import json
import sys
import time

import digits
import torch
import workload
from plain_trial import PlainTrial, loader


def main() -> None:
    train, _ = digits.load_datasets()
    loaders = {"train": loader(train, workload.BATCH_SIZE, shuffle=True, num_workers=1)}
    for line in sys.stdin:
        torch.manual_seed(0)
        num_epochs = int(line)
        began = time.perf_counter()
        workload.train(PlainTrial(None, loaders, num_epochs), num_epochs=num_epochs)
        print(json.dumps({"wall_s": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
