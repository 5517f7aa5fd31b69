"""The two kinds of requests, read and checked: token ids, the distribution to draw from, and the form of the reply."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.data.guard import ChatTemplate, GuardError
from penstock.data.tokenizer import Tokenizer, TokenTexts
from penstock.engine.generation.answers import check_prompts
from penstock.model import Limits
from penstock.serve.refusals import RefusalError, invalid, quoted
from penstock.settings import SamplingParams, ServeConfig
from penstock.settings.types import suggestion

# ---- The fields of a request's JSON object: each taken once with its kind and bounds; what is left over is refused


class Fields:
    """A JSON object from a client, whose fields are taken one by one.

    Raises:
        RefusalError: it is no object.
    """

    #: fields that have not been taken
    _left: dict[str, Any]
    #: the names of those that could be taken
    _known: list[str]

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise invalid(None, f"the body is {quoted(content)}; a JSON object is expected")
        self._left, self._known = dict(content), []

    def take(self, name: str) -> Any:
        """A field of any kind; None where it is null or missing."""
        self._known.append(name)
        return self._left.pop(name, None)

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that change nothing here."""
        for name in names:
            self.take(name)

    def truth(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(name, f"{name} is {quoted(value)}; true or false is expected")
        return default if value is None else value

    def whole(self, name: str, least: int, most: int, why: str = "") -> int | None:
        """A whole number within bounds; `why` is put behind the upper one."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(name, f"{name} is {quoted(value)}; a whole number from {least} to {most}{why} is expected")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number within bounds."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(name, f"{name} is {quoted(value)}; a number from {least:g} to {most:g} is expected")
        return float(value)

    def word(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(name, f"{name} is {quoted(value)}; a string is expected")
        return value

    def unsupported(self, name: str, *harmless: Any) -> None:
        """Refuse a field of OpenAI's interface that this server lacks, unless its value asks for nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise invalid(name, f"{name} is {quoted(value)}; this server does not have it, leave it out")

    def end(self) -> None:
        """Refuse fields that were not taken."""
        for name in self._left:
            raise invalid(name[:80], f"there is no field {quoted(name)}; {suggestion(name, self._known)}")


def text_in(name: str, value: Any) -> str:
    """A string that can be written as UTF-8. Raises: RefusalError for anything else."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} is {quoted(value)}; a string is expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"{name} cannot be written as UTF-8 ({error.reason}); give whole characters") from None
    return value


# ---- The two kinds of requests, read and checked: token ids, the distribution to draw from, and the form of the reply


MOST_LOG_PROBS, _MOST_STOPS, _MOST_STOP_LENGTH, _MOST_BIASES = 20, 16, 256, 1024
# What a completion has where nothing is said, as in OpenAI's interface.
_USUAL_TOKENS = 16
# Temperatures nearer to zero would make logits infinite.
_LEAST_TEMPERATURE = 0.01
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True)
class ServedModel:
    """The facts by which requests are read.

    limits: what this server takes. max_unfinished: answers that may be computed or wait at a time. sampling: the
    model's own settings of `SamplingParams`, by name.
    """

    name: str
    created: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    limits: Limits
    max_unfinished: int
    end_tokens: tuple[int, ...]
    sampling: Mapping[str, Any]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of the tokenizer's single tokens."""
        return TokenTexts(self.tokenizer)


@dataclass(frozen=True)
class AskedAnswers:
    """One request. num_log_probs: the likeliest tokens to report at each place; None for no log-probabilities."""

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    num_log_probs: int | None
    is_chat: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.num_samples

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def read_completion(body: Any, model: ServedModel, config: ServeConfig) -> AskedAnswers:
    """Read the body of /v1/completions. Raises: RefusalError."""
    fields = Fields(body)
    _check_model(fields, model)
    prompts = _prompts(fields.take("prompt"), model, config)
    num_log_probs = fields.whole("logprobs", 0, MOST_LOG_PROBS)
    length = fields.whole("max_tokens", 1, model.limits.max_length)
    for name, harmless in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1,))):
        fields.unsupported(name, *harmless)
    content = _Content(prompts, length or _USUAL_TOKENS, num_log_probs, is_chat=False)
    return _asked(fields, content, model, config)


def read_chat(body: Any, model: ServedModel, config: ServeConfig) -> AskedAnswers:
    """Read the body of /v1/chat/completions. Raises: RefusalError."""
    fields = Fields(body)
    _check_model(fields, model)
    prompt = _conversation(fields.take("messages"), model)
    wants, likeliest = fields.truth("logprobs"), fields.whole("top_logprobs", 0, MOST_LOG_PROBS)
    if likeliest is not None and not wants:
        raise invalid("top_logprobs", f"top_logprobs is {likeliest}, but logprobs is not true; set it")
    newer, older = (fields.whole(name, 1, model.limits.max_length) for name in ("max_completion_tokens", "max_tokens"))
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens", f"max_tokens is {older}, but max_completion_tokens is {newer}; give one of them")
    length = newer or older or max(1, model.limits.max_length - len(prompt))
    for name, harmless in (
        *((name, ()) for name in ("functions", "function_call", "audio", "prediction", "web_search_options")),
        *(("tools", ([],)), ("tool_choice", ("none",)), ("parallel_tool_calls", (True, False))),
        *(("modalities", (["text"],)), ("response_format", ({"type": "text"},))),
        *(("reasoning_effort", ("none",)), ("verbosity", ("medium",))),
    ):
        fields.unsupported(name, *harmless)
    content = _Content([prompt], length, (likeliest or 0) if wants else None, is_chat=True)
    return _asked(fields, content, model, config)


@dataclass(frozen=True)
class _Content:
    """The fields that the two kinds of requests have under other names. length: the most new tokens."""

    prompts: list[list[int]]
    length: int
    num_log_probs: int | None
    is_chat: bool


def _asked(fields: Fields, content: _Content, model: ServedModel, config: ServeConfig) -> AskedAnswers:
    """The rest of a request, whose fields both kinds have."""
    stream, options = fields.truth("stream"), fields.take("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options is {quoted(options)}; a JSON object is expected")
    usage = Fields(options or {})
    include_usage = usage.truth("include_usage")
    usage.ignore(["include_obfuscation"])
    usage.end()
    given = _sampling(fields, model, config)
    fields.ignore(_NO_EFFECT)
    fields.end()
    prompts, length, num_log_probs = content.prompts, content.length, content.num_log_probs
    _check_lengths(prompts, given.get("min_new_tokens", 0), length, model)
    given["max_new_tokens"] = length
    if num_log_probs is not None:
        given |= {"raw_log_probs": True, "top_log_probs": min(num_log_probs, model.limits.vocab_size)}
    try:
        params = SamplingParams(**given)
        check_prompts(prompts, [params] * len(prompts), model.limits)
    except ValueError as error:
        raise invalid(None, str(error)) from None
    asked = AskedAnswers(prompts, params, stream, include_usage, num_log_probs, content.is_chat)
    most, why = _most_choices(model, config)
    if asked.num_choices > most:
        raise invalid("n", f"the request asks for {asked.num_choices} answers; at most {most}{why} are possible")
    return asked


def _check_lengths(prompts: list[list[int]], least: int, length: int, model: ServedModel) -> None:
    """Refuse answers of at least `least` and at most `length` tokens that cannot be."""
    if least > length:
        raise invalid("min_tokens", f"min_tokens is {least}, but max_tokens is {length}; give no more than that")
    longest = model.limits.max_length
    for number, prompt in enumerate(prompts):
        if len(prompt) + length > longest:
            raise invalid(
                None,
                f"prompt {number} has {len(prompt)} tokens, and with max_tokens={length} more it would pass the "
                f"{longest} that this server takes (--max-length)",
            )


def _most_choices(model: ServedModel, config: ServeConfig) -> tuple[int, str]:
    """The most answers of one request, and the limit that this is, to be put behind the number."""
    if config.max_choices <= model.max_unfinished:
        return config.max_choices, " (--max-choices)"
    # More than may be under way at a time could never be taken.
    return model.max_unfinished, " (as many as this server computes at a time, --max-waiting included)"


def _sampling(fields: Fields, model: ServedModel, config: ServeConfig) -> dict[str, Any]:
    """Settings of `SamplingParams`: the model's own, and above them the request's."""
    temperature = fields.number("temperature", 0, 2)
    if temperature is not None and 0 < temperature < _LEAST_TEMPERATURE:
        raise invalid("temperature", f"temperature is {temperature:g}; 0, or {_LEAST_TEMPERATURE} to 2 is possible")
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1)
    top_k = fields.whole("top_k", -1, model.limits.vocab_size)
    end_tokens = () if fields.truth("ignore_eos") else model.end_tokens
    given = {
        "temperature": temperature,
        "top_p": fields.number("top_p", 1e-6, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "logit_bias": _biases(fields.take("logit_bias"), model),
        "stop": _stops(fields.take("stop"), model),
        "num_samples": fields.whole("n", 1, *_most_choices(model, config)),
        # Beyond OpenAI's interface, under the names that other servers have for them.
        # 0 and -1 leave all tokens, as others have it, and not as many as the model's own settings.
        "top_k": top_k if top_k is None or top_k > 0 else model.limits.vocab_size,
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.1, 10),
        "min_new_tokens": fields.whole("min_tokens", 0, model.limits.max_length),
    }
    # As OpenAI's: without a seed each call draws anew.
    seed = secrets.randbits(64) if seed is None else seed % (1 << 64)
    return {
        **{name: value for name, value in model.sampling.items() if name != "max_new_tokens"},
        **{name: value for name, value in given.items() if value is not None},
        "end_tokens": end_tokens,
        "seed": seed,
    }


def _check_model(fields: Fields, model: ServedModel) -> None:
    name = fields.word("model")
    if name is None:
        raise invalid("model", f"model is missing; this server has {model.name!r}")
    if name != model.name:
        message = f"there is no model {quoted(name)}; this server has {model.name!r}"
        raise RefusalError(404, message, "model", "model_not_found")


# ---- prompts


def _prompts(value: Any, model: ServedModel, config: ServeConfig) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    if value is None:
        raise invalid("prompt", "prompt is missing; give a text or token ids")
    several = isinstance(value, list) and bool(value) and not _are_ids(value)
    prompts = value if several else [value]
    most, why = _most_choices(model, config)
    if len(prompts) > most:
        raise invalid("prompt", f"there are {len(prompts)} prompts; at most {most}{why} are possible")
    return [_prompt(prompt, model) for prompt in prompts]


def _prompt(value: Any, model: ServedModel) -> list[int]:
    if isinstance(value, list):
        if not _are_ids(value):
            raise invalid("prompt", f"prompt is {quoted(value)}; a text or a list of token ids is expected")
        return value
    return _tokens("prompt", text_in("prompt", value), model, special_tokens=True)


def _are_ids(values: list[Any]) -> bool:
    """True for one whole number or more; prompts are long, and this is quicker than to ask each."""
    return {type(one) for one in values} == {int}


def _tokens(name: str, text: str, model: ServedModel, special_tokens: bool) -> list[int]:
    if model.tokenizer is None:
        raise invalid(name, f"{name} is a text, but the model has no tokenizer; give token ids to /v1/completions")
    tokens = model.tokenizer.encode([text], special_tokens)[0].tolist()
    if not tokens:
        raise invalid(name, f"{name} is empty; a model continues what has at least one token")
    return tokens


def _conversation(value: Any, model: ServedModel) -> list[int]:
    """The tokens of a conversation, up to the beginning of the answer."""
    if model.template is None:
        raise invalid(
            "messages", "the model has no chat template; use /v1/completions, or start the server with --chat-template"
        )
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"messages is {quoted(value)}; a list of messages is expected")
    messages = [_message(f"messages[{place}]", one) for place, one in enumerate(value)]
    try:
        text = model.template.render(messages)
    except GuardError as error:
        raise invalid("messages", str(error)) from None
    return _tokens("messages", text_in("messages", text), model, special_tokens=False)


def _message(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {quoted(value)}; an object with role and content is expected")
    fields = Fields(value)
    role, content = text_in(f"{where}.role", fields.take("role")), fields.take("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{place}]", part) for place, part in enumerate(content))
    found = {"role": role, "content": text_in(f"{where}.content", content)}
    name = fields.word("name")
    for lacking in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
        fields.unsupported(lacking, [])
    fields.end()
    return found if name is None else {**found, "name": text_in(f"{where}.name", name)}


def _part(where: str, value: Any) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise invalid(where, f"{where} is {quoted(value)}; only parts of the type text are possible")
    return text_in(f"{where}.text", value.get("text"))


# ---- other fields


def _stops(value: Any, model: ServedModel) -> tuple[str, ...] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise invalid("stop", f"stop is {quoted(value)}; a text or a list of up to {_MOST_STOPS} is expected")
    texts = tuple(text_in("stop", stop) for stop in stops)
    if any(not 0 < len(text) <= _MOST_STOP_LENGTH for text in texts):
        raise invalid("stop", f"stop is {quoted(value)}; texts of 1 to {_MOST_STOP_LENGTH} characters are expected")
    if texts and model.tokenizer is None:
        raise invalid("stop", "stop is a text, but the model has no tokenizer; leave it out")
    return texts


def _biases(value: Any, model: ServedModel) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _MOST_BIASES:
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
