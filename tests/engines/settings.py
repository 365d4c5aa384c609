"""What the engines of these tests are loaded with, and asked."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_logprobs": 20, "disable_log_stats": False,
}  # fmt: skip
PROMPTS = ["The capital of France is", "Three fruits:", "def add(a, b):"]
