"""Generation by other libraries: models of the same shape, which answer the same prompts."""

import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation_task import Generation


def llama(generation: Generation, device: str = "cpu") -> Any:
    """A model of transformers of the shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ours = generation.config
    config = LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.key_heads,
        max_position_embeddings=ours.max_length,
        tie_word_embeddings=ours.tie_embeddings,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def transformers_sides(
    generation: Generation, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[], None]]:
    """Greedy `transformers.generate` of the same prompts with a model of the same shape, by kind of cache."""
    model = llama(generation, device).to(dtype).eval()
    given = torch.tensor(generation.prompts(generation.num_prompts), device=device)

    @torch.inference_mode()
    def generate(cache: str | None) -> None:
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=generation.new_tokens,
            min_new_tokens=generation.new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        assert made.shape[1] == generation.prompt_tokens + generation.new_tokens

    return {"growing cache": partial(generate, None), "static cache": partial(generate, "static")}


def check_ctranslate2(compute_type: str) -> None:
    """Refuse a comparison that cannot be made here.

    Raises:
        ValueError: CTranslate2 is missing, or does not compute with these numbers on this processor.
    """
    if find_spec("ctranslate2") is None:
        raise ValueError("--against ctranslate2 needs it; install it with pip install 'penstock[bench]'")
    import ctranslate2  # pyright: ignore[reportMissingImports]

    possible = sorted(ctranslate2.get_supported_compute_types("cpu"))
    if compute_type not in possible:
        raise ValueError(
            f"--against ctranslate2: on this processor it does not compute in {compute_type}; possible are "
            f"{', '.join(possible)}, so --precision fp32 or --quantize int8, or the comparison with transformers alone"
        )


def ctranslate2_sides(generation: Generation, compute_type: str) -> dict[str, Callable[[], None]]:
    """Greedy generation by CTranslate2 of a model converted on the spot, by how it uses two cores.

    compute_type: one of CTranslate2's, such as int8. Raises: ImportError where it is not installed.
    """
    import ctranslate2  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        given, converted = Path(folder) / "given", Path(folder) / "converted"
        llama(generation).save_pretrained(given)
        _words(generation.vocab_size).save_pretrained(given)
        TransformersConverter(str(given)).convert(str(converted), quantization=compute_type)
        forms = {"two threads": (1, 2), "two workers": (2, 1)}
        generators = {
            name: ctranslate2.Generator(
                *(str(converted), "cpu"), compute_type=compute_type, inter_threads=workers, intra_threads=threads
            )
            for name, (workers, threads) in forms.items()
        }
    prompts = [[f"t{token}" for token in prompt] for prompt in generation.prompts(generation.num_prompts)]

    def generate(name: str) -> None:
        made = generators[name].generate_batch(
            prompts,
            max_batch_size=-(-len(prompts) // forms[name][0]),
            max_length=generation.new_tokens,
            min_length=generation.new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert all(len(answer.sequences_ids[0]) == generation.new_tokens for answer in made)

    return {name: partial(generate, name) for name in forms}


def _words(count: int) -> Any:
    """A tokenizer with a word for each id, which the conversion asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{number}": number for number in range(count)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2")
