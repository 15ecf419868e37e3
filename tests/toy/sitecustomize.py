"""A Python that finds this has one more accelerator: torch's "meta", whose tensors are empty.

One entry is all that optuna-fleet is told; the rest is what the torch of such a device has.
"""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.testing._internal.distributed.fake_pg  # a backend of groups, "fake"

_FILE = Path(__file__).parents[2] / "optuna_fleet" / "accelerator.py"
_SPEC = importlib.util.spec_from_file_location("optuna_fleet.accelerator", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
accelerator = importlib.util.module_from_spec(_SPEC)
importlib.sys.modules[_SPEC.name] = accelerator  # before anything else imports it
_SPEC.loader.exec_module(accelerator)
accelerator.ACCELERATORS += (
    accelerator.Accelerator(
        type="meta",
        backend="fake",
        visible="TOY_VISIBLE_DEVICES",
        drivers=(__file__,),
        nodes="toy[0-9]*",
        interface="TOY_SOCKET_IFNAME",
        environment={"TOY_WATCHDOG": "0"},
        failures=("the toy is broken",),
    ),
)

torch.meta = MagicMock(stream=nullcontext, get_rng_state=torch.get_rng_state)
torch.meta.device_count.return_value = 2
torch.meta.get_device_name.side_effect = ["Toy A", "Toy B"]
torch.meta.current_device.return_value = 0
torch.meta.mem_get_info.return_value = (1 << 30, 1 << 30)
torch.meta.Event.return_value.elapsed_time.return_value = 1.0
torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
