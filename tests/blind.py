"""What would wait for a GPU, found without one."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

READS = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique",
    "_unique2", "unique_dim", "repeat_interleave", "bincount",
}  # fmt: skip


class Blind(TorchDispatchMode):
    """Refuses what would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in READS:
            raise AssertionError(f"{func} waits for the device")
        by_booleans = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert not by_booleans, "an index of booleans waits for the device"
        return func(*args, **kwargs or {})


def beside(real: Any) -> Any:
    """An operator of ours, which waits for nothing on a GPU, and has tests of its own for that."""

    def call(*tensors: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return real(*tensors, **options)

    return call
