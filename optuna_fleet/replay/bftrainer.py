"""The workloads of BFTrainer's experiments, as far as its authors printed them."""

from __future__ import annotations

from typing import Any

_NODES = [1, 2, 4, 8, 16, 32, 64]
_THOUSANDS_PER_S = {
    "AlexNet": [7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1],
    "ResNet18": [5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7],
    "MnasNet": [3.2, 6.0, 11.5, 23.1, 43.9, 83.5, 160.5],
    "MobileNets": [3.0, 5.9, 11.4, 22.0, 42.5, 82.3, 155.2],
    "ShuffleNet": [2.8, 5.3, 10.0, 20.4, 38.9, 74.1, 145.1],
    "VGG-16": [1.2, 2.4, 4.7, 9.3, 18.3, 36.2, 70.2],
    "DenseNet": [1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8],
}
"""Table 2: by number of nodes."""

_TRAINER = {
    "n_jobs": 1000,  # sections 5.1 and 5.2
    "Pmax_images": 130e6,  # section 4.2: 100 epochs
    "Jmin": 1,
    "Jmax": 64,
    # Not in the paper, but in the simulator published with it:
    "Tcup_s": 18.0,
    "Tcdw_s": 12.0,
    "spacing_s": 36.0,
}

BFTRAINER: dict[str, Any] = {
    "scaling": {
        name: {"nodes": _NODES, "images_per_s": [1000 * rate for rate in rates]}
        for name, rates in _THOUSANDS_PER_S.items()
    },
    "hpo_shufflenet": {**_TRAINER, "dnn": "ShuffleNet"},
    "diverse": {**_TRAINER, "cycle": list(_THOUSANDS_PER_S)},
}
"""What a workload file holds."""
