"""Requests and replies without HTTP: what is read of one, and the places of tokens in a streamed one."""

import json
from collections.abc import Callable
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from penstock.data.chat_template import ChatTemplate
from penstock.data.tokenizer import ByteTokenizer, TokenTexts
from penstock.engine.generation.requests import TokenDelta
from penstock.model import Limits
from penstock.schedule import Token
from penstock.serve.asked import CHAT, COMPLETION, CompletionRequest, Field, ServedModel, read_chat, read_completion
from penstock.serve.refusals import RefusalError
from penstock.serve.replies import Reply
from penstock.settings import ServeConfig
from penstock.settings.declare import in_words

TOKENIZER = ByteTokenizer()


TEMPLATE = ChatTemplate("{{ messages[0].content }}")


def model(**changes: Any) -> ServedModel:
    return replace(ServedModel("m", ServeConfig(), 0, TOKENIZER, TEMPLATE, Limits(256, 64), 8, (), {}), **changes)


def read(*, served: ServedModel | None = None, **fields: Any) -> CompletionRequest:
    return read_completion({"model": "m", "prompt": "a", **fields}, served or model())


def refusal(ask: Callable[..., Any], **fields: Any) -> str:
    with pytest.raises(RefusalError) as refused:
        ask(**fields)
    assert refused.value.status == 400
    return refused.value.message


def chat(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return read_chat(body, model())


def test_prompt_and_answer_may_fill_what_the_server_takes_and_no_more() -> None:
    assert read(prompt=[7] * 4, max_tokens=60).params.max_new_tokens == 60
    assert read(prompt=[7] * 63, max_tokens=1, min_tokens=1).params.max_new_tokens == 1
    assert chat(max_tokens=63).params.max_new_tokens == 63
    assert chat().params.max_new_tokens == 63, "all that the prompt leaves"
    for refused in (
        refusal(read, prompt=[7] * 4, max_tokens=61),
        refusal(read, prompt=[7] * 64, max_tokens=1),
        refusal(read, prompt=[[7], [7] * 4], max_tokens=61),
        refusal(chat, max_tokens=64),
        refusal(chat, messages=[{"role": "user", "content": "a" * 64}]),
    ):
        assert "more it would pass the model's max_length=64" in refused


@pytest.mark.parametrize("fields", [{"n": 9}, {"prompt": ["a"] * 9}, {"prompt": ["a"] * 3, "n": 3}])
def test_a_refusal_of_answers_names_the_limit_that_they_pass(fields: dict[str, Any]) -> None:
    assert "8 (--max-choices, --max-waiting)" in refusal(read, **fields)
    assert read(served=model(max_unfinished=16), **fields).num_choices == 9
    assert "16 (--max-choices, --max-waiting)" in refusal(read, served=model(max_unfinished=17), n=17)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_can_be_switched_off_where_the_model_has_one(off: int) -> None:
    served = model(sampling={"top_k": 5})
    assert read(served=served).params.top_k == 5
    assert read(served=served, top_k=off).params.top_k == 256
    assert "from -1 to 256" in refusal(read, top_k=-2)


def test_each_part_of_a_streamed_reply_says_where_its_tokens_begin() -> None:
    reply = Reply(read(logprobs=0), "m", TokenTexts(TOKENIZER))
    deltas = [TokenDelta(0, Token(token), "", None) for token in "aéb".encode()]
    parts = [reply.part(0, delta) for delta in deltas]
    offsets = [part["choices"][0]["logprobs"]["text_offset"] for part in parts if part is not None]
    assert offsets == [[0], [1], [1], [2]]


@pytest.mark.shows(182)
def test_an_unknown_field_is_answered_with_fields_that_work_the_nearest_first() -> None:
    assert refusal(read, stop_tokens=[1]) == "there is no field 'stop_tokens'; did you mean 'stop_token_ids'?"
    assert refusal(read, temp=1) == "there is no field 'temp'; did you mean 'temperature'?"
    said = refusal(chat, guided_json={}).partition("there are ")[2].split(", ")
    works = [name for name, field in CHAT.items() if field.harmless is None]
    assert sorted(said) == sorted(works) and "tools" in CHAT and "tools" not in said
    near = [SequenceMatcher(None, "guided_json", name).ratio() for name in said]
    assert near == sorted(near, reverse=True)


@pytest.mark.shows(182)
def test_end_tokens_of_a_request_stand_beside_the_models_own() -> None:
    served = model(end_tokens=(5,))
    assert read(served=served, stop_token_ids=[7, 8]).params.end_tokens == (5, 7, 8)
    assert read(served=served, stop_token_ids=[7], ignore_eos=True).params.end_tokens == (7,)
    for token in (-1, 256):
        said = refusal(read, served=served, stop_token_ids=[7, token])
        assert "end_tokens" in said and "0" in said


@pytest.mark.shows(182, 203)
def test_a_repeated_prompt_is_an_answer_that_is_known() -> None:
    asked = read(prompt=[[1, 2, 3], [4]], echo=True, logprobs=1, max_tokens=2)
    assert asked.prompts == [[1], [4]] and asked.num_prompt_tokens == 4
    assert [own.begins_with for own in asked.params_of_each] == [(2, 3), ()]
    assert [own.max_new_tokens for own in asked.params_of_each] == [4, 2]
    for served, fields in ((model(), {"min_tokens": 2}), (model(sampling={"min_new_tokens": 2}), {})):
        asked = read(prompt=[[1, 2, 3], [4]], echo=True, logprobs=1, max_tokens=2, served=served, **fields)
        assert [own.min_new_tokens for own in asked.params_of_each] == [4, 2]
    twice = Reply(read(prompt=[1, 2, 3], echo=True, logprobs=1, max_tokens=2, n=2), "m", TokenTexts(TOKENIZER))
    for place in range(2):
        for token in (2, 3, 7, 8):
            twice.add(place, TokenDelta(place, Token(token), "", None))
    assert twice.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert read(prompt=[1, 2], echo=True).params_of_each == ()
    assert read(prompt=[1, 2], echo=True, max_tokens=0).params_of_each[0].max_new_tokens == 1
    longest = model().limits.max_length
    assert read(prompt=[1] * longest, echo=True, max_tokens=0).num_prompt_tokens == longest
    assert "it would pass" in refusal(read, prompt=[1] * longest, echo=True, max_tokens=1)
    assert "one token, and max_tokens is 0" in refusal(read, prompt=[1], echo=True, max_tokens=0)
    assert "0 with echo" in refusal(read, max_tokens=0)
    assert "stop is not possible with echo" in refusal(read, echo=True, stop="a")
    assert "stream is not possible with echo" in refusal(read, echo=True, stream=True)


@pytest.mark.shows(182)
def test_a_template_is_given_its_switches() -> None:
    served = model(template=ChatTemplate("{{ 'x' if thinks else messages[0].content * 3 }}"))
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert read_chat(body, served).prompts == [[97] * 3]
    assert read_chat({**body, "chat_template_kwargs": {"thinks": True}}, served).prompts == [[120]]
    with pytest.raises(RefusalError, match="'messages' is no argument of its own"):
        read_chat({**body, "chat_template_kwargs": {"messages": []}}, served)


def described(field: Field | None) -> str:
    """What a field takes, for the page."""
    if field is None:
        return ""
    if field.harmless is not None:
        return f"only {' or '.join(f'`{json.dumps(one)}`' for one in field.harmless)}" if field.harmless else "refused"
    kind = "" if field.kind is Any else in_words(field.kind)
    most = (
        f", to the {field.most}" if isinstance(field.most, str) else "" if field.most is None else f" to {field.most}"
    )
    return f"{kind}{f' from {field.least}' if field.most is not None else ''}{most}" or "as OpenAI's"


@pytest.mark.shows(182)
def test_the_page_has_the_table_that_requests_are_read_by() -> None:
    rows = [
        f"| `{name}` | {described(COMPLETION.get(name))} | {described(CHAT.get(name))} |"
        for name in dict.fromkeys([*COMPLETION, *CHAT])
    ]
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    assert "\n".join(rows) in page, "\n".join(rows)
