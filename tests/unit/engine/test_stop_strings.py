"""Generation against transformers' own, with stop strings, penalties and bad words together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from penstock import Engine, GenerateOptions, SamplingParams
from penstock.schedule import Ending
from tests.hugging_face import make_model, make_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 1.2}
BAD_WORDS, BIAS = [[269], [40, 41]], {33: -2.0, 270: 1.5}


@pytest.mark.shows(129)
def test_greedy_answers_and_their_ends_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    model: Any = make_model("llama", vocab_size=300)
    model.save_pretrained(tmp_path)
    prompts = [tokenizer(text)["input_ids"] for text in ("the cat", "what", "so, the mat and", "then")]
    config = GenerationConfig(
        **GREEDY, bad_words_ids=BAD_WORDS, sequence_bias={(t,): b for t, b in BIAS.items()}, pad_token_id=0
    )
    engine = Engine.from_hf(tmp_path)
    params = SamplingParams(**GREEDY, temperature=0, bad_words=tuple(map(tuple, BAD_WORDS)), logit_bias=BIAS)

    def expected(prompt: list[int], **more: Any) -> tuple[int, ...]:
        with torch.no_grad():
            found: torch.Tensor = model.generate(
                torch.tensor([prompt]), generation_config=config, eos_token_id=None, **more
            )
        return tuple(found[0, len(prompt) :].tolist())

    free = [expected(prompt) for prompt in prompts]
    assert [answer.tokens for answer in engine.generate(prompts, params)] == free
    # Pieces of the free answers themselves: of one token, of two, and one that begins inside of a token.
    decode: Any = tokenizer.decode
    *spanning, within = decode(list(free[0][1:3])), decode(list(free[2][2:4]))[1:], decode([free[1][6]])
    assert not any(piece in decode([token]) for piece in spanning for tokens in free for token in tokens)
    stop = (*spanning, within)
    options = GenerateOptions(tokenizer=tokenizer)
    stopped = engine.generate(prompts, replace(params, stop=stop), options)
    assert [answer.tokens for answer in stopped] == [
        expected(prompt, stop_strings=list(stop), tokenizer=tokenizer) for prompt in prompts
    ]
    assert [answer.ending for answer in stopped][:3] == [Ending.STOPPED] * 3
    with pytest.raises(ValueError, match="give one in GenerateOptions"):
        engine.generate(prompts, SamplingParams(max_new_tokens=1, stop=("a",)))
    engine.close()
