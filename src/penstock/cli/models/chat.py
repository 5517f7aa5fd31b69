"""`penstock chat MODEL`: a conversation in the terminal, written by the model's own chat template."""

import signal
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.models.session import IMPORTS, ModelCommand
from penstock.cli.options import PROCESSES, Parser, add_options, given_of, options_of, parallel_options
from penstock.cli.processes.launch import WorkerCommand
from penstock.io.files import parse_json
from penstock.settings import SamplingParams
from penstock.settings.declare import suggestion

if TYPE_CHECKING:
    from penstock.data.chat_template import ChatTemplate
    from penstock.engine.engine import Engine

# Tokens of an answer where nothing is said; what was thought before it is among them.
_USUAL_TOKENS = 1024
_SAMPLING = options_of(
    SamplingParams(max_new_tokens=_USUAL_TOKENS),
    without=(
        *("logit_bias", "bad_words", "end_tokens", "filter_mask", "num_samples", "min_new_tokens", "begins_with"),
        *("raw_log_probs", "top_log_probs"),
    ),
)
_METAVARS = {"temperature": "T", "top_k": "K", "top_p": "P", "min_p": "P", "stop": "TEXT"}
_COMMANDS = {
    "/system": "/system TEXT says it ahead of a new conversation, and /system alone nothing",
    "/clear": "/clear begins a new conversation",
    "/exit": "/exit or Ctrl-D ends; Ctrl-C ends the answer",
    "/help": "/help shows this",
}


def parser() -> Parser:
    parser = Parser(
        "penstock chat",
        """Talk with the model in a folder, that of a run or of a Hugging Face model, in this process. Its own chat
template writes the conversation, all of which is read again for each answer. A line is what you say; /system TEXT,
/clear, /help and /exit are commands, and Ctrl-C ends an answer early. Lines may also come from a pipe, or be given
here.""",
        examples=(
            ("penstock chat runs/tuned", "ask, and see the answer as it comes"),
            'penstock chat model/ --system "You are brief." --temperature 0',
            """penstock chat Qwen3-0.6B/ --chat-template-kwargs '{"enable_thinking": false}'""",
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("lines", nargs="*", metavar="LINE", help="what you say, in place of what is typed")
    parser.add_argument("--system", metavar="TEXT", help="what the system says ahead of the conversation")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a template in Jinja's language of your own")
    parser.add_argument(
        "--chat-template-kwargs", type=_switches, default={}, metavar="JSON", help="the template's own switches"
    )
    sampling = parser.add_argument_group("sampling (what is not given, as the model's generation_config.json says)")
    add_options(sampling, _SAMPLING, _METAVARS, switches=True)
    Conversation.add_options(parser.add_argument_group("how it runs"))
    return parser


def _switches(word: str) -> dict[str, Any]:
    try:
        switches = parse_json(word)
    except ValueError:
        switches = None
    if not isinstance(switches, dict):
        raise ArgumentTypeError(f"{word!r} is no JSON object; give one such as '{{\"enable_thinking\": false}}'")
    return switches


class Conversation(ModelCommand):
    """One call of the command, and its conversation."""

    parser = staticmethod(parser)
    layout = parallel_options(PROCESSES)
    workers = WorkerCommand("penstock.cli.models.chat", "begins a new conversation", IMPORTS)

    #: the model's template, and how answers are drawn; their number of tokens comes with each
    template: "ChatTemplate"
    sampling: dict[str, Any]
    #: what has been said
    messages: list[dict[str, str]]

    def work(self) -> None:
        from penstock.data.chat_template import ChatTemplate

        given, model = self.given, self.look()
        template = ChatTemplate.load(model.tokenizer_folder, given.chat_template)
        if template is None or model.tokenizer is None:
            raise ValueError(
                f"{model.folder} has no chat template; give one as --chat-template FILE, or let penstock generate "
                "continue texts"
            )
        usual = {"end_tokens": model.end_tokens, "max_new_tokens": _USUAL_TOKENS}
        self.sampling = {**usual, **model.sampling, **given_of(given, _SAMPLING)}
        SamplingParams(**self.sampling)
        self.model, self.template = model, template
        self.messages = _begun(given.system)
        with self.open(model) as (engine, _):
            lines = iter(given.lines) if given.lines else iter(_said, None)
            if not given.lines and sys.stdin.isatty():
                print(f"Talk with {model.folder}; {'; '.join(_COMMANDS.values())}.")
            for line in map(str.strip, lines):
                if line.startswith("/"):
                    if line == "/exit":
                        return
                    self._command(line)
                elif line:
                    self._answer(engine, line)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/system":
            self.messages = _begun(text.strip())
        elif line == "/clear":
            self.messages = [message for message in self.messages if message["role"] == "system"]
        elif line == "/help":
            print("\n".join(_COMMANDS.values()))
        else:
            _note(f"there is no command {name!r}; {suggestion(name, list(_COMMANDS))}")

    def _answer(self, engine: "Engine", line: str) -> None:
        """Print the answer to a line as it comes; one that cannot be given leaves the conversation as it was."""
        from penstock.data.tokenizer import TokenizationError
        from penstock.engine.generation.answers import AnswerText
        from penstock.engine.generation.options import GenerateOptions

        tokenizer, asked = self.model.tokenizer, [*self.messages, {"role": "user", "content": line}]
        assert tokenizer is not None
        try:
            text, _ = self.template.rendered(asked, self.given.chat_template_kwargs, add_generation_prompt=True)
            prompt = tokenizer.encode([text], special_tokens=False)[0].tolist()
        except (TokenizationError, UnicodeEncodeError) as error:
            _note(f"the chat template or its tokenizer refuses the conversation ({error})")
            return
        room = self.model.max_generated_length() - len(prompt)
        if room < 1:
            _note(f"the conversation has {len(prompt)} tokens, too many for the model; /clear begins a new one")
            return
        params = SamplingParams(**{**self.sampling, "max_new_tokens": min(room, self.sampling["max_new_tokens"])})
        answer, asked_to_end = AnswerText(tokenizer, params.stop), []

        def show(_: int, token: int) -> None:
            print(answer.add(token), end="", flush=True)

        before = signal.signal(signal.SIGINT, lambda *_: asked_to_end.append(True))
        try:
            options = GenerateOptions(tokenizer=tokenizer)
            result = engine.generate([prompt], params, options, show, interrupt=lambda: bool(asked_to_end))
        finally:
            signal.signal(signal.SIGINT, before)
        print(answer.finish(), flush=True)
        if result[0].num_tokens == params.max_new_tokens and result[0].tokens[-1] not in params.end_tokens:
            _note(f"the answer was cut after {params.max_new_tokens} tokens; --max-new-tokens says how many")
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


def _begun(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _said() -> str | None:
    """The next line of the user; None at the end."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        # Lines can then be edited, and earlier ones recalled.
        import readline  # noqa: F401

    try:
        return input("> " if is_typed else "")
    except EOFError:
        return None


def _note(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr, flush=True)


main = Conversation.main
