"""Page-locked memory, where there is something to copy to from it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rollstore.readers import arguments


def pins(pin_memory: Any) -> bool:
    """Whether batches are pinned: as torch's DataLoader does, not where there is no accelerator, with a warning. Raises
    TypeError on what is neither True nor False."""
    arguments.flag("pin_memory", pin_memory)
    if not pin_memory or torch.accelerator.is_available():
        return bool(pin_memory)
    warnings.warn("pin_memory: wanted an accelerator to copy to, found none: batches are not pinned", stacklevel=3)
    return False
