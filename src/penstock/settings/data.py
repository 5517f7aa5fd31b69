"""The settings of the text that a run trains on."""

from dataclasses import dataclass

from penstock.settings.declare import (
    AT_LEAST_1,
    FRACTION,
    Bounds,
    NamedValue,
    Settings,
    setting,
)


class PackingKind(NamedValue):
    """The items of a batch: windows of equal length over all documents, or one document each."""

    WINDOW = "window"
    DOCUMENT = "document"


@dataclass(frozen=True)
class DataConfig(Settings, section="data"):
    """The training text.

    >>> DataConfig(corpus="texts.jsonl", sequence_length=128, packing="document").num_sequences
    8
    """

    corpus: str = setting(
        "stdlib",
        '"stdlib" (the source of Python\'s standard library), or a file, a folder, a pattern: text, JSONL, Parquet, '
        "Arrow or CSV. Rows are texts, or examples to fine-tune on: messages, or a prompt and a completion; "
        "for a reward model pairs: chosen and rejected, of texts or messages.",
    )
    validation_corpus: str | None = setting(
        None, "The text for validation; left out, part of the corpus's documents is held out."
    )
    validation_fraction: float = setting(0.1, "The share of documents held out; 0 for no validation.", FRACTION)
    tokenizer: str | None = setting(
        None,
        '"bytes", or a Hugging Face tokenizer.json, or a folder that holds one; left out, that of model.pretrained, '
        "or bytes.",
    )
    special_tokens: bool = setting(
        True, "Put around each document what the tokenizer itself puts there, such as a token for its beginning."
    )
    end_token: str | None = setting(
        None,
        "The text of the token put after every document (any text for bytes); left out, none, and the tokenizer's own "
        "after examples, and with model.pretrained after rows of text, as in TRL; an empty text for none there.",
    )
    text_field: str = setting("text", "The column or key that holds the text in JSONL and Parquet.")
    packing: PackingKind = setting(
        PackingKind.WINDOW,
        "Items of a batch: windows of equal length over all documents, or one document each; always one example each.",
    )
    cross_documents: bool = setting(False, "Attention crosses the documents that share a window.")
    sequence_length: int = setting(256, "Tokens of a window, and the most tokens of a document item.", AT_LEAST_1)
    num_sequences: int = setting(8, "Items of one step, over all data-parallel ranks.", AT_LEAST_1)
    label_share: float = setting(
        1.0,
        "The share of tokens with a label, as 0.1 where answers alone are learned: for the cut into stages, the "
        "rehearsal and the plan; a step leaves the others out of head and loss by itself.",
        Bounds(above=0, most=1),
        is_newer=True,
    )
    cache: str | None = setting(
        "~/.cache/penstock", "Folder that keeps tokenised text for other ranks and runs; None keeps it in memory."
    )
