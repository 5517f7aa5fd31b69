"""The perplexity of a saved model on a text, in this process."""

import math
from pathlib import Path

_LONGEST = 512
"""Tokens that are scored together, at most."""


def perplexity(folder: Path, text: Path) -> float:
    """The model's perplexity per token of a text, in pieces of up to 512 tokens.

    Raises: ValueError where the model has no tokenizer, or the text cannot be read or is too short.
    """
    import torch

    from penstock.data import PackedBatch
    from penstock.engine.engine import Engine
    from penstock.engine.saved_model import open_model
    from penstock.settings import ParallelConfig

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--held-out {text} cannot be read as UTF-8: {error}") from None
    model = open_model(folder)
    if model.tokenizer is None:
        raise ValueError(f"--held-out is a text, but {folder} has no tokenizer")
    tokens = torch.as_tensor(model.tokenizer.encode([content])[0], dtype=torch.int64)
    pieces = [piece for piece in tokens.split(min(_LONGEST, model.max_length)) if len(piece) > 1]
    if not pieces:
        raise ValueError(f"--held-out {text} has {len(tokens)} tokens; at least two are needed")
    engine = Engine(*model.arguments(ParallelConfig()))
    try:
        model.load(engine)
        return math.exp(engine.evaluate([PackedBatch.from_documents([piece]) for piece in pieces]))
    finally:
        engine.close()
