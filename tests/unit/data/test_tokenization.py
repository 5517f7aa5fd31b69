"""Chat templates and tokenizers: the texts and tokens of the libraries, and each failure as a reason in one line."""

from pathlib import Path

import pytest
import tokenizers

from penstock.data.chat_template import ChatTemplate
from penstock.data.tokenizer import TokenizationError, load_tokenizer, tokenization
from tests.hostile_tokenizers import MANY, PANICS, write
from tests.hugging_face import make_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_template_is_rendered_with_its_arguments_and_marks() -> None:
    template = "{{ mood }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    rendered = ChatTemplate(template).rendered(MESSAGES, {"mood": "so "}, return_assistant_tokens_mask=True)
    assert rendered == ("so hi", [(3, 5)])


@pytest.mark.shows(167)
@pytest.mark.parametrize(
    "template, told",
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% for", "unexpected 'end of template'"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    ],
)
def test_a_template_that_fails_is_a_reason(template: str, told: str) -> None:
    with pytest.raises(TokenizationError) as caught:
        ChatTemplate(template).rendered(MESSAGES)
    assert str(caught.value) == told


def test_a_prompt_for_an_answer_is_written_as_examples_are() -> None:
    source = "{% for m in messages %}{{ '!' if 'name' in m }}{{ m.content }}{{ eos_token }}{% endfor %}>"
    template = ChatTemplate(source, {"eos_token": "."})
    null, parts = {**MESSAGES[0], "name": None}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert template.render([null]) == template.rendered([null])[0] == "hi.>"
    with pytest.raises(TokenizationError, match=r"refuses the messages \(it knows no content of parts"):
        template.render([parts])
    with pytest.raises(TokenizationError, match="'messages' is no argument of its own"):
        template.rendered(MESSAGES, {"messages": []})


@pytest.mark.shows(167)
@pytest.mark.parametrize("kind", PANICS)
def test_a_tokenizer_that_panics_on_a_text_is_a_reason_and_the_next_text_is_read(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path, PANICS[kind])))
    with pytest.raises(TokenizationError) as caught:
        tokenizer.encode(["b", MANY])
    reason = "Onig: Regex search error: retry-limit-in-match over"
    assert str(caught.value) == f"the tokenizer '{tmp_path}/tokenizer.json' fails ({reason})"
    assert tokenizer.decode(tokenizer.encode(["b"])[0].tolist()) == "b"


def test_who_interrupts_a_tokenizer_is_no_failure_of_it() -> None:
    with pytest.raises(KeyboardInterrupt), tokenization("it"):
        raise KeyboardInterrupt


@pytest.mark.shows(167)
def test_long_and_many_texts_have_the_tokens_of_the_library(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(str(tmp_path))
    texts = ["the cat sat \U0001f40b on the mat\n" * 10_000, "", *(f"what then? {n}" for n in range(500))]
    for special_tokens in (True, False):
        for own, other in zip(
            ours.encode(texts, special_tokens),
            theirs.encode_batch(texts, add_special_tokens=special_tokens),
            strict=True,
        ):
            assert own.tolist() == other.ids
    assert ours.decode(own := ours.encode(texts[:1])[0].tolist()) == theirs.decode(own)
    with pytest.raises(UnicodeEncodeError):
        ours.encode(["a\ud800"])
