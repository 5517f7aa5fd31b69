"""Chat templates are rendered within limits of time and memory, in a process that ends with who asked for it."""

import os
import time
from types import SimpleNamespace

import pytest

from penstock.data.guard import ChatTemplate, Guard, GuardError

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}"


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard(most_s=1)


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def test_a_template_is_rendered_with_its_arguments_and_marks(guard: Guard) -> None:
    template = "{{ mood }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    arguments = {"messages": MESSAGES, "mood": "so ", "return_assistant_tokens_mask": True}
    assert guard.do({"chat_template": template, **arguments}) == ["so hi", [[3, 5]]]


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
    template: str, told: str, guard: Guard
) -> None:
    with pytest.raises(GuardError) as caught:
        guard.do({"chat_template": template, "messages": MESSAGES})
    assert str(caught.value) == told
    assert guard.do({"chat_template": "{{ messages[0].content }}", "messages": MESSAGES})[0] == "hi"


def test_a_prompt_for_an_answer_is_written_as_examples_are(guard: Guard) -> None:
    source = "{% for m in messages %}{{ '!' if 'name' in m }}{{ m.content }}{{ eos_token }}{% endfor %}>"
    template = ChatTemplate(source, SimpleNamespace(special_tokens_map={"eos_token": "."}), guard)
    null, parts = {**MESSAGES[0], "name": None}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert template.render([null]) == template.rendered([null])[0] == "hi.>"
    with pytest.raises(GuardError, match=r"refuses the messages \(it knows no content of parts"):
        template.render([parts])
    with pytest.raises(GuardError, match="'messages' is no argument of its own"):
        template.rendered(MESSAGES, {"messages": []})


def test_the_process_ends_with_its_renderer() -> None:
    before, guard = children(), Guard()
    guard.start()
    [own] = children() - before
    del guard
    for _ in range(600):
        if own not in children():
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")
