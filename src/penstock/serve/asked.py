"""The two kinds of requests, read and checked: token ids, the distribution to draw from, and the form of the reply.

`COMPLETION` and `CHAT` are the server's interface: a line for each field, with its type, the numbers that are possible,
and the setting of `SamplingParams` that it gives. A field that is in neither is refused.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from penstock.data.chat_template import ChatTemplate
from penstock.data.tokenizer import TokenizationError, Tokenizer, TokenTexts
from penstock.engine.generation.prompts import check_prompts
from penstock.model import Limits
from penstock.serve.refusals import RefusalError, invalid, quoted
from penstock.settings import SamplingParams, ServeConfig
from penstock.settings.declare import match, mismatch, suggestion

MOST_LOG_PROBS, _MOST_STOPS, _MOST_STOP_LENGTH, _MOST_BIASES = 20, 16, 256, 1024
# What a completion has where nothing is said, as in OpenAI's interface.
_USUAL_TOKENS = 16
# Temperatures nearer to zero would make logits infinite.
_LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class ServedModel:
    """The facts by which requests are read.

    config: the server's settings. limits: what it takes. max_unfinished: answers that may be computed or wait at
    a time. sampling: the model's own settings of `SamplingParams`, by name.
    """

    name: str
    config: ServeConfig
    created: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    limits: Limits
    max_unfinished: int
    end_tokens: tuple[int, ...]
    sampling: Mapping[str, Any]

    def most(self, limit: str) -> tuple[int, str]:
        """The largest number that a limit allows, and the option that sets it, to be put behind the number."""
        if limit != "choices":
            return {"vocabulary": self.limits.vocab_size, "length": self.limits.max_length}[limit], ""
        # More than may be under way at a time could never be taken.
        return min(self.config.max_choices, self.max_unfinished), " (--max-choices, --max-waiting)"

    def check_name(self, name: str) -> None:
        """Refuse another model's name. Raises: RefusalError."""
        if name != self.name:
            message = f"there is no model {quoted(name)}; this server has {self.name!r}"
            raise RefusalError(404, message, "model", "model_not_found")

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of the tokenizer's single tokens."""
        return TokenTexts(self.tokenizer)


@dataclass(frozen=True)
class CompletionRequest:
    """One request. num_log_probs: the likeliest tokens to report at each place; None for no log-probabilities."""

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    num_log_probs: int | None
    is_chat: bool
    #: the whole prompts where the reply repeats them, and the parameters of each where they differ
    echoed: tuple[list[int], ...] = ()
    params_of_each: tuple[SamplingParams, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.num_samples

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.echoed or self.prompts))


def text_in(name: str, value: Any) -> str:
    """A string that can be written as UTF-8. Raises: RefusalError for anything else."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} is {quoted(value)}; a string is expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"{name} cannot be written as UTF-8 ({error.reason}); give whole characters") from None
    return value


# ---- The fields of requests


@dataclass(frozen=True)
class Field:
    """A field of a request: what it may hold, and what it gives."""

    #: the type of its value
    kind: Any = Any
    #: the numbers that are possible, where there is a largest; a name is that of a limit, see `ServedModel.most`
    least: float = -math.inf
    most: float | str | None = None
    #: the setting of `SamplingParams` that it gives
    sets: str | None = None
    #: makes the setting of the value
    read: Callable[[Any, ServedModel], Any] | None = None
    #: of a field that this server lacks, the values that ask for nothing; others are refused
    harmless: tuple[Any, ...] | None = None


def _lacking(*harmless: Any) -> Field:
    return Field(harmless=harmless)


def _temperature(value: float, model: ServedModel) -> float:
    if 0 < value < _LEAST_TEMPERATURE:
        raise invalid("temperature", f"temperature is {value:g}; 0, or {_LEAST_TEMPERATURE} to 2 is possible")
    return value


def _stops(value: Any, model: ServedModel) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise invalid("stop", f"stop is {quoted(value)}; a text or a list of up to {_MOST_STOPS} is expected")
    texts = tuple(text_in("stop", stop) for stop in stops)
    if any(not 0 < len(text) <= _MOST_STOP_LENGTH for text in texts):
        raise invalid("stop", f"stop is {quoted(value)}; texts of 1 to {_MOST_STOP_LENGTH} characters are expected")
    if texts and model.tokenizer is None:
        raise invalid("stop", "stop is a text, but the model has no tokenizer; leave it out")
    return texts


def _biases(value: dict[str, Any], model: ServedModel) -> dict[int, float]:
    if len(value) > _MOST_BIASES:
        raise invalid("logit_bias", f"logit_bias is {quoted(value)}; an object of up to {_MOST_BIASES} is expected")
    found = {}
    for token, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not is_number:
            raise invalid(
                "logit_bias",
                f"logit_bias has {quoted(token)}: {quoted(bias)}; token ids with numbers from -100 to 100 are expected",
            )
        found[int(token)] = float(bias)
    return found


_OF_BOTH = {
    "model": Field(str),
    "stream": Field(bool),
    "stream_options": Field(dict),
    "n": Field(int, 1, "choices", "num_samples"),
    "temperature": Field(float, 0, 2, "temperature", _temperature),
    "top_p": Field(float, 1e-6, 1, "top_p"),
    "presence_penalty": Field(float, -2, 2, "presence_penalty"),
    "frequency_penalty": Field(float, -2, 2, "frequency_penalty"),
    "logit_bias": Field(dict, sets="logit_bias", read=_biases),
    "stop": Field(sets="stop", read=_stops),
    "stop_token_ids": Field(tuple[int, ...]),
    "seed": Field(int, -(1 << 63), (1 << 64) - 1, "seed", lambda value, model: value % (1 << 64)),
    # Beyond OpenAI's interface, under the names that other servers have for them.
    # 0 and -1 leave all tokens, as others have it, and not as many as the model's own settings.
    "top_k": Field(int, -1, "vocabulary", "top_k", lambda k, model: k if k > 0 else model.limits.vocab_size),
    "min_p": Field(float, 0, 1, "min_p"),
    "repetition_penalty": Field(float, 0.1, 10, "repetition_penalty"),
    "min_tokens": Field(int, 0, "length", "min_new_tokens"),
    "ignore_eos": Field(bool),
    # These change nothing here.
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), Field()),
}
COMPLETION = {
    **_OF_BOTH,
    "prompt": Field(),
    "logprobs": Field(int, 0, MOST_LOG_PROBS),
    "max_tokens": Field(int, 0, "length"),
    "echo": Field(bool),
    "suffix": _lacking(""),
    "best_of": _lacking(1),
}
CHAT = {
    **_OF_BOTH,
    "messages": Field(),
    "chat_template_kwargs": Field(dict),
    "logprobs": Field(bool),
    "top_logprobs": Field(int, 0, MOST_LOG_PROBS),
    "max_completion_tokens": Field(int, 1, "length"),
    "max_tokens": Field(int, 1, "length"),
    **dict.fromkeys(("functions", "function_call", "audio", "prediction", "web_search_options"), _lacking()),
    "tools": _lacking([]),
    "tool_choice": _lacking("none"),
    "parallel_tool_calls": _lacking(True, False),
    "modalities": _lacking(["text"]),
    "response_format": _lacking({"type": "text"}),
    "reasoning_effort": _lacking("none"),
    "verbosity": _lacking("medium"),
}
_STREAM_OPTIONS = {"include_usage": Field(bool), "include_obfuscation": Field()}
_MESSAGE = {
    "role": Field(),
    "content": Field(),
    "name": Field(str),
    **dict.fromkeys(("tool_calls", "tool_call_id", "function_call", "audio", "refusal"), _lacking([])),
}


def read_fields(content: Any, table: Mapping[str, Field], model: ServedModel, where: str = "") -> dict[str, Any]:
    """The values of a JSON object's fields, but for those that are null. Raises: RefusalError."""
    values = {}
    for name, value in content.items():
        place, field = f"{where}{name}", table.get(name)
        if field is None:
            works = [known for known, field in table.items() if field.harmless is None]
            works.sort(key=lambda known: SequenceMatcher(None, name[:80], known).ratio(), reverse=True)
            raise invalid(place[:80], f"there is no field {quoted(name)}; {suggestion(name, works)}")
        if value is None:
            continue
        if field.harmless is not None:
            if not any(type(value) is type(one) and value == one for one in field.harmless):
                raise invalid(place, f"{place} is {quoted(value)}; this server does not have it, leave it out")
            continue
        fits, matched = match(field.kind, value)
        if not fits:
            raise invalid(place, mismatch(place, value, field.kind))
        if field.most is not None:
            most, why = model.most(field.most) if isinstance(field.most, str) else (field.most, "")
            if not field.least <= matched <= most:
                raise invalid(place, f"{place} is {quoted(value)}; from {field.least} to {most}{why} is possible")
        values[name] = matched if field.read is None else field.read(matched, model)
    return values


# ---- The two kinds of requests


def read_completion(body: Any, model: ServedModel) -> CompletionRequest:
    """Read the body of /v1/completions. Raises: RefusalError."""
    given = _read(body, COMPLETION, model)
    given.setdefault("max_tokens", _USUAL_TOKENS)
    prompts = _prompts(given.get("prompt"), model)
    if not given.get("echo"):
        if not given["max_tokens"]:
            raise invalid("max_tokens", "max_tokens is 0; from 1 on is possible, and 0 with echo")
        return _request(given, COMPLETION, prompts, given.get("logprobs"), model)
    for name in ("stream", "stop"):
        if given.get(name):
            raise invalid(name, f"{name} is not possible with echo; leave one of them out")
    least = {**given, "max_tokens": max(1, given["max_tokens"])}
    firsts = [prompt[:1] for prompt in prompts]
    # Where no token is new, the prompts may be as long as the model takes.
    read = prompts if given["max_tokens"] else firsts
    plain = replace(_request(least, COMPLETION, read, given.get("logprobs"), model), echoed=tuple(prompts))
    if plain.num_log_probs is None and given["max_tokens"]:
        return plain
    params_of_each = []
    for number, prompt in enumerate(prompts):
        # All but the first token are an answer that is known, so that each has its log-probability.
        num_known = len(prompt) - 1
        if num_known + given["max_tokens"] < 1:
            raise invalid("prompt", f"prompt {number} has one token, and max_tokens is 0; nothing would be computed")
        known = {**given, "begins_with": prompt[1:], "stop": (), "seed": plain.params.seed}
        known["max_tokens"] = num_known + given["max_tokens"]
        if least_new := plain.params.min_new_tokens:
            known["min_tokens"] = num_known + least_new
        params_of_each.append(_request(known, COMPLETION, [firsts[number]], given.get("logprobs"), model).params)
    return replace(plain, prompts=firsts, params_of_each=tuple(params_of_each))


def read_chat(body: Any, model: ServedModel) -> CompletionRequest:
    """Read the body of /v1/chat/completions. Raises: RefusalError."""
    given = _read(body, CHAT, model)
    prompt = _conversation(given.get("messages"), model, given.get("chat_template_kwargs", {}))
    wants, likeliest = given.get("logprobs", False), given.get("top_logprobs")
    if likeliest is not None and not wants:
        raise invalid("top_logprobs", f"top_logprobs is {likeliest}, but logprobs is not true; set it")
    newer, older = given.get("max_completion_tokens"), given.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens", f"max_tokens is {older}, but max_completion_tokens is {newer}; give one of them")
    given["max_tokens"] = newer or older or max(1, model.limits.max_length - len(prompt))
    return _request(given, CHAT, [prompt], (likeliest or 0) if wants else None, model)


def _read(body: Any, table: Mapping[str, Field], model: ServedModel) -> dict[str, Any]:
    """The fields of a request to this server's model."""
    if not isinstance(body, dict):
        raise invalid(None, f"the body is {quoted(body)}; a JSON object is expected")
    given = read_fields(body, table, model)
    name = given.get("model")
    if name is None:
        raise invalid("model", f"model is missing; this server has {model.name!r}")
    model.check_name(name)
    return given


def _request(
    given: Mapping[str, Any],
    table: Mapping[str, Field],
    prompts: list[list[int]],
    num_log_probs: int | None,
    model: ServedModel,
) -> CompletionRequest:
    """The request, whose settings of `SamplingParams` are the model's own and above them its fields'."""
    usage = read_fields(given.get("stream_options", {}), _STREAM_OPTIONS, model, "stream_options.")
    settings = {name: value for name, value in model.sampling.items() if name != "max_new_tokens"}
    # As OpenAI's: without a seed each call draws anew.
    settings |= {"seed": secrets.randbits(64), "max_new_tokens": given["max_tokens"]}
    settings |= {field.sets: given[name] for name, field in table.items() if field.sets and name in given}
    settings["end_tokens"] = (*(() if given.get("ignore_eos") else model.end_tokens), *given.get("stop_token_ids", ()))
    settings["begins_with"] = tuple(given.get("begins_with", ()))
    if num_log_probs is not None:
        settings |= {"raw_log_probs": True, "top_log_probs": min(num_log_probs, model.limits.vocab_size)}
    try:
        params = SamplingParams(**settings)
        check_prompts(prompts, [params] * len(prompts), model.limits)
    except ValueError as error:
        raise invalid(None, str(error)) from None
    stream, usage_too = given.get("stream", False), usage.get("include_usage", False)
    request = CompletionRequest(prompts, params, stream, usage_too, num_log_probs, is_chat=table is CHAT)
    most, why = model.most("choices")
    if request.num_choices > most:
        raise invalid("n", f"the request asks for {request.num_choices} answers; at most {most}{why} are possible")
    return request


# ---- prompts


def _prompts(value: Any, model: ServedModel) -> list[list[int]]:
    if value is None:
        raise invalid("prompt", "prompt is missing; give a text or token ids")
    several = isinstance(value, list) and bool(value) and not _are_ids(value)
    prompts = value if several else [value]
    most, why = model.most("choices")
    if len(prompts) > most:
        raise invalid("prompt", f"there are {len(prompts)} prompts; at most {most}{why} are possible")
    for prompt in prompts:
        if isinstance(prompt, list) and not _are_ids(prompt):
            raise invalid("prompt", f"prompt is {quoted(prompt)}; a text or a list of token ids is expected")
    return [
        prompt if isinstance(prompt, list) else _tokens("prompt", text_in("prompt", prompt), model, special_tokens=True)
        for prompt in prompts
    ]


def _are_ids(values: list[Any]) -> bool:
    """True for one whole number or more; prompts are long, and this is quicker than to ask each."""
    return {type(one) for one in values} == {int}


def _tokens(name: str, text: str, model: ServedModel, special_tokens: bool) -> list[int]:
    if model.tokenizer is None:
        raise invalid(name, f"{name} is a text, but the model has no tokenizer; give token ids to /v1/completions")
    try:
        tokens = model.tokenizer.encode([text], special_tokens)[0].tolist()
    except TokenizationError as error:
        raise invalid(name, f"{name} cannot be read: {error}") from None
    if not tokens:
        raise invalid(name, f"{name} is empty; a model continues what has at least one token")
    return tokens


def _conversation(value: Any, model: ServedModel, switches: Mapping[str, Any]) -> list[int]:
    """The tokens of a conversation, up to the beginning of the answer. switches: arguments of the template."""
    if model.template is None:
        raise invalid(
            "messages", "the model has no chat template; use /v1/completions, or start the server with --chat-template"
        )
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"messages is {quoted(value)}; a list of messages is expected")
    messages = [_message(f"messages[{place}]", one, model) for place, one in enumerate(value)]
    try:
        text = model.template.render(messages, switches)
    except TokenizationError as error:
        raise invalid("messages", str(error)) from None
    return _tokens("messages", text_in("messages", text), model, special_tokens=False)


def _message(where: str, value: Any, model: ServedModel) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {quoted(value)}; an object with role and content is expected")
    message = {"role": None, "content": None, **read_fields(value, _MESSAGE, model, f"{where}.")}
    if isinstance(message["content"], list):
        for place, part in enumerate(message["content"]):
            if not isinstance(part, dict) or part.get("type") != "text":
                said = f"{where}.content[{place}] is {quoted(part)}; only parts of the type text are possible"
                raise invalid(f"{where}.content[{place}]", said)
        message["content"] = "".join(text_in(f"{where}.content", part.get("text")) for part in message["content"])
    return {name: text_in(f"{where}.{name}", text) for name, text in message.items()}
