"""Chat templates and tokenizers work within limits of time and memory, in a process that ends with who asked for it."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.data.guard import ChatTemplate, Guard, GuardError
from penstock.data.tokenizer import FileTokenizer, load_tokenizer
from tests.hostile_tokenizers import HUGE, MANY, READS, WRITES, write
from tests.hugging_face import make_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}"


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard(most_s=1)


@pytest.fixture(scope="module")
def patient() -> Guard:
    return Guard(most_s=60)


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def test_a_template_is_rendered_with_its_arguments_and_marks(guard: Guard) -> None:
    template = "{{ mood }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    arguments = {"messages": MESSAGES, "mood": "so ", "return_assistant_tokens_mask": True}
    assert guard.do("render", {"chat_template": template, **arguments}) == ["so hi", [[3, 5]]]


@pytest.mark.parametrize(
    "template, told",
    [
        (LOOP, "it computes for more than 1 s"),
        ("{{ 9 ** (9 ** 9) }}", "it computes for more than 1 s"),
        ("{{ 'a' * 10**11 }}", "MemoryError"),
        ("{{ 'a' * 10**8 }}", "it writes more than 67108864 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% for", "unexpected 'end of template'"),
    ],
)
def test_a_template_without_end_or_sense_is_a_reason_and_the_next_is_rendered(
    template: str, told: str, guard: Guard, patient: Guard
) -> None:
    # What ends by itself has time to, on a slow machine too: only what has no end is ended for its time.
    guard = guard if "computes" in told else patient
    with pytest.raises(GuardError) as caught:
        guard.do("render", {"chat_template": template, "messages": MESSAGES})
    assert str(caught.value) == told
    assert guard.do("render", {"chat_template": "{{ messages[0].content }}", "messages": MESSAGES})[0] == "hi"


def test_a_prompt_for_an_answer_is_written_as_examples_are(guard: Guard) -> None:
    source = "{% for m in messages %}{{ '!' if 'name' in m }}{{ m.content }}{{ eos_token }}{% endfor %}>"
    template = ChatTemplate(source, {"eos_token": "."}, guard)
    null, parts = {**MESSAGES[0], "name": None}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert template.render([null]) == template.rendered([null])[0] == "hi.>"
    with pytest.raises(GuardError, match=r"refuses the messages \(it knows no content of parts"):
        template.render([parts])
    with pytest.raises(GuardError, match="'messages' is no argument of its own"):
        template.rendered(MESSAGES, {"messages": []})


def test_the_process_ends_with_its_renderer() -> None:
    before, guard = children(), Guard()
    guard.do("render", {"chat_template": "a", "messages": MESSAGES})
    [own] = children() - before
    del guard
    for _ in range(600):
        if own not in children():
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")


# ---- Tokenizers


def opened(folder: Path, content: dict[str, Any], guard: Guard) -> FileTokenizer:
    tokenizer = load_tokenizer(str(write(folder, content)))
    assert isinstance(tokenizer, FileTokenizer)
    return replace(tokenizer, guard=guard)


@pytest.mark.shows(167)
@pytest.mark.parametrize("kind", READS)
def test_a_tokenizer_that_cannot_read_a_text_is_a_reason_and_the_next_text_is_read(kind: str, tmp_path: Path) -> None:
    content, reason = READS[kind]
    tokenizer = opened(tmp_path, content, Guard())
    with pytest.raises(GuardError) as caught:
        tokenizer.encode(["b", MANY])
    told = str(caught.value)
    assert told.startswith(f"the tokenizer '{tmp_path}/tokenizer.json' fails (") and reason in told and "\n" not in told
    assert tokenizer.decode(tokenizer.encode(["b"])[0].tolist()).endswith("b")


@pytest.mark.shows(167)
def test_a_tokenizer_that_cannot_write_is_a_reason(tmp_path: Path, guard: Guard) -> None:
    tokenizer = opened(tmp_path, WRITES, guard)
    with pytest.raises(GuardError, match=r"computes for more than 1 s|takes more than 1 GiB"):
        tokenizer.decode([65])
    assert tokenizer.encode(["b"])[0].tolist() == [65]


@pytest.mark.shows(167)
def test_a_huge_added_token_is_as_any(tmp_path: Path, guard: Guard) -> None:
    tokenizer = opened(tmp_path, HUGE, guard)
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode(["a" * 500_000])[0].tolist() == [256]


def test_long_and_many_texts_have_the_tokens_of_the_library(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(str(tmp_path))
    # Each of these takes as much memory as a short one may.
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


def test_the_texts_of_a_batch_are_one_piece_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(tmp_path)
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(str(tmp_path))
    assert isinstance(ours, FileTokenizer)
    several = [[], [5], [5, 9], [80, 81, 82]]
    ours.prepare(several)
    monkeypatch.setattr(Guard, "do", lambda *_: pytest.fail("it was asked again"))
    assert [ours.decode(tokens) for tokens in several] == [theirs.decode(tokens) for tokens in several]


def test_another_tokenizer_in_the_same_place_is_read_anew(tmp_path: Path, guard: Guard) -> None:
    """By one process, which keeps the last that it has opened."""
    first = opened(tmp_path / "a", HUGE, guard)
    make_tokenizer(tmp_path / "b")
    second = load_tokenizer(str(tmp_path / "b"))
    assert isinstance(second, FileTokenizer)
    second = replace(second, guard=guard)
    for _ in range(2):
        assert (first.entry(3), second.entry(3)) == ("$", "<|im_start|>")
    make_tokenizer(tmp_path / "b", adds_bos=False)
    third = load_tokenizer(str(tmp_path / "b"))
    assert isinstance(third, FileTokenizer)
    assert len(second.encode(["a"])[0]) == 2
    assert len(replace(third, guard=guard).encode(["a"])[0]) == 1
