"""Tokenizers and models for the command line, from local folders. The only module of it that imports transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers: wanted this package, found none; pip install 'rollstore[hf]'") from None
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    return transformers


def require_folder(path: str, what: str) -> None:
    """Raises ValueError where the path is no folder: a name is never looked up on a hub."""
    if not Path(path).is_dir():
        raise ValueError(f"{path}: wanted a folder with a {what}, found none")


def token_texts(path: str, ids: Sequence[int]) -> list[str | None]:
    """The text of each token. A character that spans tokens stands at the last; ids that the tokenizer lacks are None.

    Raises ValueError where the path holds no tokenizer.
    """
    loaded = tokenizer(path)
    size = len(loaded)

    def decoded(some: Sequence[int]) -> str:
        return str(loaded.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts: list[str | None] = []
    settled, read = 0, 0  # ids[settled:read] are what the next token's text is read behind
    for n, token in enumerate(ids):
        if token >= size:
            texts.append(None)
            settled = read = n + 1
            continue
        before, now = decoded(ids[settled:read]), decoded(ids[settled : n + 1])
        if now.endswith("\ufffd") and n + 1 - read < 4:  # part of a character; none is longer than four tokens
            texts.append("")
            continue
        texts.append(now[len(before) :])
        settled, read = read, n + 1
    return texts


def tokenizer(path: str) -> Any:
    """The tokenizer in a folder. Raises ValueError where the path holds none."""
    require_folder(path, "tokenizer")
    try:
        return _library().AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: wanted a tokenizer, {_first_line(error)}") from None


def model(path: str, dtype: str) -> PreTrainedModel:
    """A causal language model for replay, in the given dtype (`auto`: as its checkpoint says).

    Raises ValueError where the path holds none.
    """
    require_folder(path, "checkpoint")
    library = _library()
    try:
        loaded = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: wanted a language model, {_first_line(error)}") from None
    return cast("PreTrainedModel", loaded.eval())


def _first_line(error: Exception) -> str:
    return f"got: {str(error).strip().splitlines()[0]}" if str(error).strip() else f"got {type(error).__name__}"
