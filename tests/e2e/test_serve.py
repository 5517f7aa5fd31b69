"""`penstock serve` against the client of OpenAI: its answers are those of `penstock generate`, whole and streamed."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.e2e.serving import KEY, MAX_LENGTH, Served, serving, write_model
from tests.e2e.test_generate_command import call
from tests.hugging_face import reference_logits

if TYPE_CHECKING:
    import openai

PROMPTS = ["the cat", "so what then?"]
# Sampled alike by both: with a seed, at a temperature at which nothing is certain.
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
WORDS = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "11"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """A server of two stages that asks for a key."""
    with serving(model, "--pp", "2", "--rows", "2", "--max-waiting", "4", "--max-choices", "4", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> "openai.OpenAI":
    # Where it is used, for whoever only collects tests: it takes a second.
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def generated(model: Path, prompts: list[str], *words: str) -> list[dict[str, Any]]:
    """The answers of `penstock generate` on one process."""
    code, out, err = call(str(model), *prompts, *words, "--json", "--raw-log-probs")
    assert code == 0, err
    return json.loads(out)["answers"]


def test_the_client_finds_the_model(client: "openai.OpenAI", served: Served) -> None:
    import openai

    assert [found.id for found in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("big/one")
    assert json.loads(served.get("/health")[1]) == {"status": "ok", "model": "tiny"}


@pytest.mark.shows(134)
def test_whole_and_streamed_completions_are_what_generate_gives(client: "openai.OpenAI", model: Path) -> None:
    words = ["--max-new-tokens", "24", "--samples", "2", "--stop", "e", "--stop", " s", "--top-log-probs", "2"]
    expected = generated(model, PROMPTS, *WORDS, *words)
    assert {answer["ending"] for answer in expected} >= {"length", "stopped"}, "no stop string was met, or all were"
    asked: Any = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 24, "n": 2, "stop": ["e", " s"], "logprobs": 2}
    whole = client.completions.create(**asked, **SAMPLING)
    assert whole.usage is not None and whole.usage.completion_tokens == sum(len(one["tokens"]) for one in expected)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = {place: {"text": "", "tokens": [], "log_probs": [], "end": None} for place in range(4)}
    usages = []
    for part in client.completions.create(**asked, **SAMPLING, stream=True, stream_options={"include_usage": True}):
        usages += [part.usage] if part.usage else []
        for choice in part.choices:
            found, log_probs = streamed[choice.index], choice.logprobs
            assert log_probs is not None
            found["text"] += choice.text
            found["end"] = found["end"] or choice.finish_reason
            found["tokens"] += log_probs.tokens
            found["log_probs"] += log_probs.token_logprobs
    assert usages == [whole.usage]
    for answer, choice, parts in zip(expected, whole.choices, streamed.values(), strict=True):
        reason = "length" if answer["ending"] == "length" else "stop"
        assert (choice.text, choice.finish_reason) == (answer["text"], reason)
        assert (parts["text"], parts["end"]) == (answer["text"], reason)
        log_probs: Any = choice.logprobs
        assert log_probs.token_logprobs == pytest.approx(answer["raw_log_probs"], abs=1e-4)
        assert parts["log_probs"] == log_probs.token_logprobs
        assert parts["tokens"] == log_probs.tokens
        for ours, theirs in zip(log_probs.top_logprobs, answer["top_log_probs"], strict=True):
            assert list(ours.values()) == pytest.approx(sorted(value for _, value in theirs), abs=1e-4)


@pytest.mark.shows(134)
def test_a_chat_is_what_generate_gives_for_the_rendered_conversation(client: "openai.OpenAI", model: Path) -> None:
    rendered = "<|im_start|>system be short<|im_end|><|im_start|>user the cat<|im_end|><|im_start|>assistant "
    words = ["--max-new-tokens", "16", "--samples", "2", "--no-special-tokens", "--top-log-probs", "3"]
    expected = generated(model, [rendered], *WORDS, *words, "--presence-penalty", "0.5", "--logit-bias", "40=2")
    asked: Any = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]},
        ],
        "max_completion_tokens": 16,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 0.5,
        "logit_bias": {"40": 2},
        **SAMPLING,
    }
    whole = client.chat.completions.create(**asked)
    texts, log_probs = ["", ""], [[], []]
    for part in client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                log_probs[choice.index] += [one.logprob for one in choice.logprobs.content or ()]
    assert [answer["text"] for answer in expected] == texts
    for answer, choice, streamed in zip(expected, whole.choices, log_probs, strict=True):
        assert choice.message.content == answer["text"]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert [one.logprob for one in content] == pytest.approx(answer["raw_log_probs"], abs=1e-4)
        assert streamed == [one.logprob for one in content]
        for ours, theirs in zip(content, answer["top_log_probs"], strict=True):
            assert [one.logprob for one in ours.top_logprobs] == pytest.approx([v for _, v in theirs], abs=1e-4)


@pytest.mark.shows(134)
@pytest.mark.shows(182)
def test_a_harness_scores_by_repeated_prompts_as_transformers_does(client: "openai.OpenAI", model: Path) -> None:
    texts = [torch.tensor([1, 60, 4, 2, 90, 7, 251, 60]), torch.tensor([33, 2])]
    # What the client local-completions of lm-eval 0.4.13 sends, and how it reads the reply.
    asked: Any = {"prompt": [text.tolist() for text in texts], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    reply = client.completions.create(model="tiny", **asked, seed=1234, echo=True)
    expected = reference_logits(model, texts).log_softmax(-1).split([len(text) for text in texts])
    for text, choice, log_probs in zip(texts, reply.choices, expected, strict=True):
        found: Any = choice.logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        own = log_probs[:-1].gather(-1, text[1:, None])[:, 0]
        assert found.token_logprobs[1:-1] == pytest.approx(own.tolist(), abs=1e-4)
        assert found.token_logprobs[-1] == pytest.approx(float(log_probs[-1].max()), abs=1e-4)
        likeliest = [max(top, key=top.get) for top in found.top_logprobs[1:-1]]
        is_greedy = [one == two for one, two in zip(likeliest, found.tokens[1:-1], strict=True)]
        assert is_greedy == (log_probs[:-1].argmax(-1) == text[1:]).tolist()
    usage = reply.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (10, 2)
    whole = client.completions.create(model="tiny", prompt="the cat", max_tokens=8, temperature=0, echo=True)
    plain = client.completions.create(model="tiny", prompt="the cat", max_tokens=8, temperature=0)
    scored = client.completions.create(
        model="tiny", prompt="the cat", max_tokens=8, temperature=0, echo=True, logprobs=0
    )
    assert whole.choices[0].text == "the cat" + plain.choices[0].text == scored.choices[0].text
    alone = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True, logprobs=0)
    assert alone.choices[0].text == "the cat" and alone.usage and alone.usage.completion_tokens == 0


@pytest.mark.shows(182)
def test_lm_evals_own_client_scores_as_transformers_does(served: Served, model: Path) -> None:
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="make test-lm-eval installs lm-eval")
    make = pytest.importorskip("lm_eval.api.instance").Instance
    harness = api.LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="tiny",
        tokenizer=str(model),
        header={"Authorization": f"Bearer {KEY}"},
        max_length=MAX_LENGTH,
        batch_size=2,
    )
    pairs = [("the cat", " sat on the mat"), ("so what", " then?"), ("one", " two three four")]
    asked = [make("loglikelihood", {}, arguments=pair, idx=n) for n, pair in enumerate(pairs)]
    found = harness.loglikelihood(asked)
    for pair, (log_prob, is_greedy) in zip(pairs, found, strict=True):
        context, continuation = harness._encode_pair(*pair)
        text = torch.tensor(context + continuation)
        expected = reference_logits(model, [text])[len(context) - 1 : -1].log_softmax(-1)
        own = expected.gather(-1, text[len(context) :, None]).sum()
        assert log_prob == pytest.approx(float(own), abs=1e-3)
        assert is_greedy == torch.equal(expected.argmax(-1), text[len(context) :])


@pytest.mark.shows(182)
def test_a_request_gives_the_template_its_switches_and_end_tokens_of_its_own(
    client: "openai.OpenAI", model: Path
) -> None:
    rendered = "<|im_start|>user the cat<|im_end|><|im_start|>assistant so "
    [expected] = generated(model, [rendered], "--temperature", "0", "--max-new-tokens", "8", "--no-special-tokens")
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "temperature": 0}
    switches = {"chat_template_kwargs": {"opening": "so "}}
    answer = client.chat.completions.create(**asked, max_tokens=8, extra_body=switches)
    assert answer.choices[0].message.content == expected["text"]
    ends = {**switches, "stop_token_ids": [expected["tokens"][2]]}
    answer = client.chat.completions.create(**asked, max_tokens=8, extra_body=ends)
    assert answer.choices[0].finish_reason == "stop" and answer.usage
    assert answer.usage.completion_tokens == expected["tokens"].index(expected["tokens"][2]) + 1


@pytest.mark.shows(134)
def test_without_a_seed_answers_differ_and_greedy_ones_do_not(client: "openai.OpenAI", model: Path) -> None:
    asked: Any = {"model": "tiny", "prompt": "the cat", "max_tokens": 16}
    texts = {client.completions.create(**asked).choices[0].text for _ in range(3)}
    assert len(texts) > 1
    expected = generated(model, ["the cat"], "--max-new-tokens", "16", "--temperature", "0")[0]["text"]
    assert {client.completions.create(**asked, temperature=0).choices[0].text for _ in range(2)} == {expected}


@pytest.mark.shows(134)
def test_errors_reach_the_client_as_its_own(client: "openai.OpenAI", served: Served) -> None:
    import openai

    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="another").completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match=f"pass the model's max_length={MAX_LENGTH}") as refused:
        client.completions.create(model="tiny", prompt="a " * 300)
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature is 3; from 0 to 2 is possible") as refused:
        client.completions.create(model="tiny", prompt="a", temperature=3)
    assert refused.value.param == "temperature"


def test_more_than_may_wait_is_refused_and_who_leaves_makes_room(client: "openai.OpenAI", served: Served) -> None:
    import openai

    """Four rows and four that wait: two requests of four answers each fill the server."""
    asked: Any = {"model": "tiny", "prompt": "the cat", "n": 4, "max_tokens": 240, "stream": True, "seed": 1}
    ends: Any = {"extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**asked, **ends) for _ in range(2)]
    for stream in streams[:1]:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="8 answers are waiting or running"):
        client.completions.create(**asked, **ends)
    for stream in streams:
        stream.close()
    served.wait_for("answers_running", 0)
    served.wait_for("answers_waiting", 0)
    assert served.figure("cancelled_answers_total") == 8
    num_begun = served.figure("time_to_first_token_seconds_count")
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].finish_reason
    assert served.figure("time_to_first_token_seconds_count") == num_begun + 1


def test_sigterm_finishes_running_answers_refuses_new_ones_and_ends_well(model: Path) -> None:
    """Eight answers over one row: the last of them wait while the server is told to end."""
    with serving(model, "--rows", "1", "--host", "localhost") as served:
        got: list[Any] = []
        asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 120, "seed": 1, "ignore_eos": True}
        running = threading.Thread(target=lambda: got.append(served.post("/v1/completions", {**asked, "n": 8})))
        running.start()
        served.wait_for("answers_waiting", 7)
        served.started.signal(signal.SIGTERM)
        while served.get("/health")[0] == 200:
            time.sleep(0.001)
        status, refused = served.post("/v1/completions", asked)
        running.join(60)
        ended = served.started.end(60)
    assert status == 503 and "the server is ending" in refused["error"]["message"]
    ((status, content),) = got
    assert status == 200
    assert content["usage"]["completion_tokens"] == 8 * 120
    assert ended.exit_code == 0, ended.err
    assert "ending once the running answers are finished" in ended.err
    # A line for each request: the one that was answered, and the one that was refused.
    lines = re.findall(r"^127.0.0.1 POST /v1/completions (\d+) in [\d.]+ s(.*)$", ended.err, re.MULTILINE)
    num_read = content["usage"]["prompt_tokens"]
    assert lines == [("503", ""), ("200", f", {num_read} tokens read and {8 * 120} written")]
    assert "Traceback" not in ended.err


def test_a_rank_that_dies_ends_the_server_with_a_word_and_503(model: Path) -> None:
    with serving(model, "--pp", "2", "--rows", "1") as served:
        got: list[Any] = []
        asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 250, "seed": 1, "ignore_eos": True}

        def ask() -> None:
            while not got or got[-1][0] == 200:
                got.append(served.post("/v1/completions", asked))

        asking = threading.Thread(target=ask)
        asking.start()
        served.wait_for("answers_running", 1)
        served.started.signal(signal.SIGKILL, [1])
        asking.join(60)
        ended = served.started.end(60)
    assert ended.exit_code == 1
    assert got[-1][0] == 503
    assert "the server has failed" in got[-1][1]["error"]["message"]
    assert "rank 1" in ended.err and "SIGKILL" in ended.err
