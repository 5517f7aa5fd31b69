"""A model's own settings of generation, in its folder's generation_config.json: those that hold, and those that do not.

Fields, their meaning and their defaults are those of transformers' `GenerationConfig`.
"""

from pathlib import Path
from typing import Any

from penstock.settings import ConfigError
from penstock.settings.json_files import read_json_object

GENERATION_CONFIG = "generation_config.json"
_SAMPLED = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that would change an answer, and the values besides null that change nothing.
_LACKING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha", "top_h"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_strings", "sequence_bias"), ([], {}, "")),
    **dict.fromkeys(("force_words_ids", "constraints", "dola_layers", "exponential_decay_length_penalty"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "max_time"), ()),
    "max_length": (20,),
}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The settings of `SamplingParams` that the folder's file names; as there, top_p follows top_k.

    Raises: ConfigError for a file that cannot be read, or words that are no tokens.
    """
    content = _content(folder)
    found = {name: content[name] for name in _SAMPLED if content.get(name) is not None}
    if found.get("top_k") == 0:
        del found["top_k"]
    if {"top_k", "top_p"} <= found.keys():
        found["chained"] = True
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    if words := content.get("bad_words_ids"):
        if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
            path = folder / GENERATION_CONFIG
            raise ConfigError(f"{path}: bad_words_ids is {str(words)[:60]}; a list of lists of token ids is expected")
        found["bad_words"] = words
    return found


def lacking_defaults(folder: Path) -> dict[str, Any]:
    """The fields of the folder's file that would change answers in transformers, and have no effect here."""
    content = _content(folder)
    found = {name: content.get(name) for name in _LACKING}
    # In transformers as well, the number of new tokens decides where both are given.
    if content.get("max_new_tokens") is not None:
        del found["max_length"]
    return {name: value for name, value in found.items() if value is not None and value not in _LACKING[name]}


def _content(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG
    return read_json_object(path) if path.is_file() else {}
