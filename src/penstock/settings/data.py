"""The text that a run learns from."""

from dataclasses import dataclass

from penstock.settings.declare import AT_LEAST_1, Bounds, NamedValue, Settings, setting


class PackingKind(NamedValue):
    """How documents become the items of a batch: windows of equal length over all of them, or a document each."""

    WINDOW = "window"
    DOCUMENT = "document"


@dataclass(frozen=True)
class DataConfig(Settings, section="data"):
    """The training text."""

    corpus: str = setting(
        "stdlib",
        '"stdlib" (the source of Python\'s standard library), or a file, a folder, a pattern: text, JSONL or Parquet.',
    )
    validation_corpus: str | None = setting(
        None, "Where validation reads; left out, part of the corpus's own documents is held back."
    )
    validation_fraction: float = setting(
        0.1,
        "The share of documents held back; 0 for no validation.",
        Bounds(least=0, below=1, otherwise="leaves no text"),
    )
    tokenizer: str = setting("bytes", '"bytes", or a Hugging Face tokenizer.json, or a folder that holds one.')
    end_token: str | None = setting(
        None, "The token put after every document, by its text (for bytes any text will do); left out, none."
    )
    text_field: str = setting("text", "The column or key that holds the text in JSONL and Parquet.")
    packing: PackingKind = setting(
        PackingKind.WINDOW, "Items of a batch: windows of equal length over all documents, or a document each."
    )
    cross_documents: bool = setting(False, "Attention reaches over documents that share a window.")
    sequence_length: int = setting(256, "Tokens of one window, and the most of one document.", AT_LEAST_1)
    num_sequences: int = setting(8, "Items of one step, over all data-parallel ranks.", AT_LEAST_1)
    cache: str | None = setting(
        "~/.cache/penstock", "Where tokenised text is kept for other ranks and runs; None keeps it in memory."
    )
