"""Chat templates are rendered within limits of time and memory, in a process that ends with who asked for it."""

import os
import time
from types import SimpleNamespace

import pytest

from penstock.data.chat_template import ChatTemplate, ChatTemplateError, RenderingError, TemplateRenderer

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}"


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(most_s=1)


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def test_a_template_is_rendered_with_its_arguments_and_marks(renderer: TemplateRenderer) -> None:
    template = "{{ mood }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    rendered = renderer.render(template, messages=MESSAGES, mood="so ", return_assistant_tokens_mask=True)
    assert rendered == ("so hi", [(3, 5)])


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
    template: str, told: str, renderer: TemplateRenderer
) -> None:
    with pytest.raises(RenderingError) as caught:
        renderer.render(template, messages=MESSAGES)
    assert str(caught.value) == told
    assert renderer.render("{{ messages[0].content }}", messages=MESSAGES).text == "hi"


def test_a_prompt_for_an_answer_is_written_as_examples_are(renderer: TemplateRenderer) -> None:
    source = "{% for m in messages %}{{ '!' if 'name' in m }}{{ m.content }}{{ eos_token }}{% endfor %}>"
    template = ChatTemplate(source, SimpleNamespace(special_tokens_map={"eos_token": "."}), renderer)
    null, parts = {**MESSAGES[0], "name": None}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert template.render([null]) == template.rendered([null]).text == "hi.>"
    with pytest.raises(ChatTemplateError, match=r"refuses the messages \(it knows no content of parts"):
        template.render([parts])
    with pytest.raises(RenderingError, match="'messages' is no argument of its own"):
        template.rendered(MESSAGES, {"messages": []})


def test_the_process_ends_with_its_renderer() -> None:
    before, renderer = children(), TemplateRenderer()
    renderer.start()
    [own] = children() - before
    del renderer
    for _ in range(600):
        if own not in children():
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")
