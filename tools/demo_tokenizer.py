"""Makes examples/python_tokenizer, the tokens of the demo: a thousand, learned from Python's standard library.

A line's end and the next line's indentation are one token, and so are common words with the space before them, so a
small model spends its steps on names and syntax rather than on spaces. What comes out depends on the library's version.
"""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.data.sources import find_source

FOLDER = Path(__file__).parents[1] / "examples/python_tokenizer"
# What transformers reads beside the tokens.
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
VOCAB_SIZE = 1024
# What is never cut apart to be joined otherwise: a line's end with what is indented behind it, a word, some symbols.
PIECES = r"\n[\n ]*| ?\w+| ?[^\s\w]+|\s+"


def main() -> int:
    """Learn the tokens and write the folder."""
    made = Tokenizer(models.BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), bytes_alone])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator((text for _, text in find_source("stdlib", "text").documents()), trainer)
    FOLDER.mkdir(exist_ok=True)
    made.save(str(FOLDER / "tokenizer.json"), pretty=False)
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(SETTINGS, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
