"""Tensors of a dozen values need no second thread, and two test workers on two cores would only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
