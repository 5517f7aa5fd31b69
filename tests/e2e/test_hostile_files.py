"""Files made to do harm, given to every command: none runs, reaches out of its folder, or ends in a traceback."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.output import ResultsFile
from tests.e2e.training import write_run
from tests.hostile_tokenizers import MANY, PANICS, write
from tests.hugging_face import make_model

SECRET = "a secret of somebody's"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP, DEEP_TOML = b"[" * 100_000, b"a = " + b"[" * 100_000
CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Place:
    """A folder that somebody has handed over, and another that is none of its business."""

    inside: Path
    outside: Path

    @property
    def model(self) -> Path:
        return self.inside / "model"

    @property
    def run(self) -> Path:
        return self.inside / "run"

    @property
    def checkpoint(self) -> Path:
        return max((self.run / "checkpoints").glob("step-*"))

    @property
    def python(self) -> str:
        """Code that shows it has run."""
        return f"open({str(self.outside / 'ran')!r}, 'w')\nclass Any: pass\n"

    @property
    def pickle(self) -> bytes:
        """A pickle that shows it was loaded."""

        class Hostile:
            def __reduce__(_self) -> Any:
                return (Path.touch, (self.outside / "ran",))

        return pickle.dumps(Hostile())

    def put(self, name: str, content: bytes | str) -> Path:
        path = self.inside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def link(self, name: str, target: Path | None = None) -> None:
        """Put a link in the place of a file, to the secret or another target."""
        path = self.put(name, "")
        path.unlink()
        path.symlink_to(target or self.outside / "secret.txt")

    def change(self, name: str, **changes: Any) -> None:
        """Change values of a JSON object."""
        path = self.inside / name
        before = json.loads(path.read_text()) if path.exists() else {}
        self.put(name, json.dumps({**before, **changes}))

    def sign(self, **changes: Any) -> None:
        """Change the newest checkpoint's manifest, and let its checksum fit."""
        content = json.loads((self.checkpoint / "manifest.json").read_text()) | changes
        content.pop("sha256")
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (self.checkpoint / "manifest.json").write_text(json.dumps(content))

    def pickle_as_tensors(self) -> None:
        """Replace the tensors of the newest checkpoint by a pickle, and let all checksums fit."""
        [file] = self.checkpoint.glob("*.safetensors")
        file.write_bytes(self.pickle)
        size, sha256 = len(self.pickle), hashlib.sha256(self.pickle).hexdigest()
        self.sign(files={file.name: {"size_bytes": size, "sha256": sha256}})


Act = Callable[[Place], object]
Words = Callable[[Place], list[str]]


def generate(*more: str) -> Words:
    return lambda p: [
        *("generate", str(p.model), "--file", str(p.inside / "prompts.jsonl"), "--max-new-tokens", "2"),
        *("--output", str(p.inside / "answers.jsonl"), *more),
    ]


def score(p: Place) -> list[str]:
    return ["score", str(p.model), str(p.inside / "prompts.jsonl"), "--output", str(p.inside / "scores.jsonl")]


def use_run(p: Place) -> list[str]:
    return ["generate", str(p.run), "abc", "--max-new-tokens", "2"]


def train(*more: str) -> Words:
    """The command that made the run, which goes on with it; words may name the folder."""
    return lambda p: ["train", str(p.inside / "run.toml"), *(word.replace("INSIDE", str(p.inside)) for word in more)]


def anew(*more: str) -> Words:
    return train("--output", "INSIDE/new", *more)


def given(*words: str) -> Words:
    return lambda p: [word.replace("INSIDE", str(p.inside)) for word in words]


def convert(p: Place) -> list[str]:
    return ["convert", str(p.model), str(p.inside / "converted")]


FOREIGN = generate("--no-native")
TRAIN, REFUSED, DONE = train(), 2, 0
ADAPTED = anew("--adapter.pretrained", "INSIDE/adapter")
ADAPTER, ADAPTER_WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
PLAN = given("plan", "--model", "llama-2-7b", "--cluster", "INSIDE/cluster.toml")
SAY = given("generate", "INSIDE/model", MANY, "--max-new-tokens", "2")
TRACE = given("trace", "INSIDE/step.json", "--output", "INSIDE/step.html")


def in_model(name: str, content: bytes | str) -> Act:
    return lambda p: p.put(f"model/{name}", content)


def tokenizer() -> Act:
    """A tokenizer that fails on `MANY`, of which the prompts and a file of texts are made."""
    content = PANICS["a pattern that backtracks"]
    texts = json.dumps({"text": MANY, "prompt": MANY}) + "\n"
    return both(lambda p: write(p.model, content), put("many.jsonl", texts), put("many.txt", MANY * 5))


def with_tokenizer(*more: str) -> Words:
    return anew("--data.tokenizer", "INSIDE/model", "--model.vocab_size", "256", *more)


def in_run(name: str, content: bytes | str) -> Act:
    return lambda p: p.put(f"run/{name}", content)


def config(**changes: Any) -> Act:
    return lambda p: p.change(f"model/{CONFIG}", **changes)


def generation(**changes: Any) -> Act:
    return lambda p: p.change(f"model/{GENERATION}", **changes)


def callback(p: Place) -> None:
    """Let the settings of the run name code as a callback."""
    text = (p.run / "run.toml").read_text()
    assert text.count("callbacks = []") == 1
    p.put("run/run.toml", text.replace("callbacks = []", f'callbacks = ["{p.inside}/code.py:Any"]'))


def signed_files(p: Place) -> None:
    p.sign(files={"../../../../outside/secret.txt": {"size_bytes": len(SECRET), "sha256": "x"}})


def put(name: str, content: bytes | str) -> Act:
    return lambda p: p.put(name, content)


def pickled(name: str) -> Act:
    return lambda p: p.put(name, p.pickle)


def linked(name: str) -> Act:
    return lambda p: p.link(name)


def python(name: str) -> Act:
    return lambda p: p.put(name, p.python)


def both(*acts: Act) -> Act:
    return lambda p: [act(p) for act in acts]


def pipe(name: str) -> Act:
    """A pipe into which nobody writes, in the place of a file."""

    def act(p: Place) -> None:
        path = p.put(name, "")
        path.unlink()
        os.mkfifo(path)

    return act


def endless(name: str) -> Act:
    """A file of 20 GiB that takes no room on the disk."""
    return lambda p: os.truncate(p.put(name, ""), 20 << 30)


def adapter(**changes: Any) -> Act:
    usual = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    return both(put(ADAPTER_WEIGHTS, b"\2\0\0\0\0\0\0\0{}"), lambda p: p.change(ADAPTER, **usual | changes))


def index_of(file: str) -> str:
    return json.dumps({"weight_map": {"a": file}})


def answers_left(content: bytes | None) -> Act:
    """Something in the place of the answers that a stopped call has left, or a link out."""

    def act(p: Place) -> None:
        assert main(generate()(p)) == 0
        (p.inside / "answers.jsonl").unlink()
        if content is None:
            names_of_answers[-1].symlink_to(p.outside / "secret.txt")
        else:
            names_of_answers[-1].write_bytes(content)

    return act


def answers_left_as_a_pipe(p: Place) -> None:
    answers_left(None)(p)
    names_of_answers[-1].unlink()
    os.mkfifo(names_of_answers[-1])


def recorded(title: str, end_ms: float) -> str:
    """A recorded step of two actions."""
    ranks = [[["0F0", 0, 0, end_ms, []], ["0B0", end_ms, end_ms, 2 * end_ms, []]]]
    measured = {"title": title, "step": 1, "unit": "ms", "stages_per_rank": 1, "ranks": ranks, "collectives": []}
    return json.dumps({"format": "penstock recorded step 1", "measured": measured, "simulated": None})


names_of_answers: list[Path] = []
FOREIGN_CODE = {"auto_map": {"AutoConfig": "code.Any", "AutoModelForCausalLM": "code.Any"}, "model_type": "code"}

# name -> what is done to the files, the command they are given to, and its exit code
KINDS: dict[str, tuple[Act, Words, int]] = {
    # models
    "weights as a pickle": (
        both(lambda p: (p.model / WEIGHTS).unlink(), pickled("model/pytorch_model.bin")), generate(), REFUSED
    ),
    "a pickle that calls itself safetensors": (pickled(f"model/{WEIGHTS}"), generate(), REFUSED),
    "a pickle beside the weights": (pickled("model/pytorch_model.bin"), generate(), DONE),
    "code beside the weights": (both(*map(python, ("model/code.py", "model/__init__.py"))), generate(), DONE),
    "an index of a file outside": (in_model(INDEX, index_of("../../outside/x.safetensors")), score, REFUSED),
    "an index of an absolute path": (in_model(INDEX, index_of("/etc/x.safetensors")), score, REFUSED),
    "an index of a pickle": (in_model(INDEX, index_of("x.bin")), score, REFUSED),
    "weights that are a link out": (linked(f"model/{WEIGHTS}"), score, REFUSED),
    "a configuration that is a link out": (linked(f"model/{CONFIG}"), score, REFUSED),
    "a tokenizer that is a link out": (linked("model/tokenizer.json"), score, REFUSED),
    "any link out": (linked("model/README.md"), convert, REFUSED),
    "a link to a folder outside": (lambda p: p.link("model/more", p.outside), convert, REFUSED),
    "a link to itself": (lambda p: p.link("model/tokenizer.json", p.model / "tokenizer.json"), score, DONE),
    "code named by the configuration": (both(config(**FOREIGN_CODE), python("model/code.py")), generate(), REFUSED),
    "the same for transformers": (
        both(config(**FOREIGN_CODE, architectures=["Any"]), python("model/code.py")), FOREIGN, REFUSED
    ),
    "a kernel from elsewhere": (config(_attn_implementation="somebody/kernel"), FOREIGN, REFUSED),
    "a billion layers": (config(num_hidden_layers=10**9), generate(), REFUSED),
    "a billion layers of transformers": (config(num_hidden_layers=10**9), FOREIGN, REFUSED),
    "bad words that are a number": (generation(bad_words_ids=3), generate(), REFUSED),
    "a temperature that is a text": (generation(temperature="x"), generate(), REFUSED),
    "a header of 2^60 bytes": (in_model(WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"), generate(), REFUSED),
    "weights that are a pipe": (pipe(f"model/{WEIGHTS}"), generate(), REFUSED),
    "a pipe beside the weights": (pipe("model/README.md"), convert, REFUSED),
    "a configuration of 20 GiB": (endless(f"model/{CONFIG}"), generate(), REFUSED),
    # their tokenizers
    "a tokenizer that panics on a prompt": (tokenizer(), SAY, REFUSED),
    "one that panics on a scored text": (tokenizer(), given("score", "INSIDE/model", "INSIDE/many.jsonl"), REFUSED),
    "one that panics on a corpus": (tokenizer(), with_tokenizer("--data.corpus", "INSIDE/many.txt"), REFUSED),
    # adapters
    "a deep adapter": (both(adapter(), put(ADAPTER, DEEP)), ADAPTED, REFUSED),
    "an adapter's pickle": (
        both(adapter(), lambda p: (p.inside / ADAPTER_WEIGHTS).unlink(), pickled("adapter/adapter_model.bin")),
        ADAPTED, REFUSED,
    ),
    "a pickle that calls itself an adapter": (both(adapter(), pickled(ADAPTER_WEIGHTS)), ADAPTED, REFUSED),
    "an adapter that is a link out": (both(adapter(), linked(ADAPTER_WEIGHTS)), ADAPTED, REFUSED),
    "an adapter of a rank of a trillion": (adapter(r=10**12), ADAPTED, REFUSED),
    "an adapter with a broken pattern": (adapter(target_modules="("), ADAPTED, REFUSED),
    "an adapter of an unknown kind": (adapter(peft_type="ANY"), ADAPTED, REFUSED),
    "an adapter for a number": (adapter(target_modules=3), ADAPTED, REFUSED),
    # runs and checkpoints
    "deep settings": (in_run("run.toml", DEEP_TOML), TRAIN, REFUSED),
    "a callback of a run used as a model": (
        both(python("code.py"), callback), use_run, DONE
    ),
    "a manifest that names a file outside": (signed_files, TRAIN, DONE),
    "a pickle as tensors, signed": (lambda p: p.pickle_as_tensors(), TRAIN, REFUSED),
    "the same in a run used as a model": (lambda p: p.pickle_as_tensors(), use_run, REFUSED),
    "a step of another name": (lambda p: p.checkpoint.rename(p.run / "checkpoints/step-00000099"), TRAIN, DONE),
    "a checkpoint that is a link out": (lambda p: p.link("run/checkpoints/step-00000099", p.outside), TRAIN, DONE),
    "an unfinished one that is a link out": (lambda p: p.link("run/checkpoints/.saving-x", p.outside), TRAIN, DONE),
    "an old one that is a link out": (lambda p: p.link("run/checkpoints/.deleting-x", p.outside), TRAIN, DONE),
    "a pickle beside a checkpoint": (lambda p: (p.checkpoint / "optimizer.pt").write_bytes(p.pickle), TRAIN, DONE),
    "metrics that are a link out": (linked("run/metrics.jsonl"), TRAIN, REFUSED),
    "a lock that is a link out": (linked("run/.lock"), TRAIN, REFUSED),
    "a picture that is a link out": (lambda p: p.link("run/timeline.png", p.outside / "new"), TRAIN, REFUSED),
    "a run's settings that are a pipe": (pipe("run/run.toml"), TRAIN, REFUSED),
    "settings that are a pipe": (pipe("run.toml"), TRAIN, REFUSED),
    "settings that are a device": (lambda p: None, given("train", "/dev/zero"), REFUSED),
    "settings of 20 GiB": (endless("run/run.toml"), use_run, REFUSED),
    "a manifest that is a pipe": (lambda p: pipe(f"run/checkpoints/{p.checkpoint.name}/manifest.json")(p), TRAIN, DONE),
    "an identity that is a pipe": (pipe("run/checkpoints/run.json"), TRAIN, REFUSED),
    "metrics that are a pipe": (pipe("run/metrics.jsonl"), TRAIN, REFUSED),
    # texts
    "prompts that are a pipe": (pipe("prompts.jsonl"), score, REFUSED),
    "prompts of 20 GiB": (endless("prompts.jsonl"), score, REFUSED),
    "answers left as a pipe": (answers_left_as_a_pipe, generate(), REFUSED),
    "rows that are a pipe": (pipe("rows/a.jsonl"), anew("--data.corpus", "INSIDE/rows"), REFUSED),
    "half a character": (put("prompts.jsonl", '{"text": "\\ud800"}'), score, REFUSED),
    "answers left as a link out": (answers_left(None), generate(), REFUSED),
    "deep answers left": (answers_left(DEEP + b"\n"), generate(), DONE),
    "answers left of other types": (answers_left(b'{"prompt": []}\n'), generate(), DONE),
    "deep rows": (put("rows.jsonl", DEEP), anew("--data.corpus", "INSIDE/rows.jsonl"), REFUSED),
    "deep messages": (
        put("rows.jsonl", b'{"messages": [{"role": "user", "content": ' + DEEP + b"}]}"),
        anew("--data.corpus", "INSIDE/rows.jsonl"), REFUSED
    ),
    "rows as a pickle": (pickled("rows.parquet"), anew("--data.corpus", "INSIDE/rows.parquet"), REFUSED),
    # what planner, schedules and drawings read
    "a cluster of other types": (put("cluster.toml", "device = {peak_tflops = {a = {}}}"), PLAN, REFUSED),
    "a cell of 200,000 letters": (
        put("s.csv", b"0F0," + b"x" * 200_000), given("schedule", "verify", "INSIDE/s.csv"), REFUSED
    ),
    "a microbatch of 5000 digits": (
        put("s.csv", b"0F" + b"9" * 5000), given("schedule", "show", "INSIDE/s.csv"), REFUSED
    ),
    "a step at infinity": (put("step.json", recorded("F", 1e308)), TRACE, REFUSED),
    "a title that is code for a browser": (put("step.json", recorded("</script><script>x()", 1)), TRACE, DONE),
    "a cluster that is a pipe": (pipe("cluster.toml"), PLAN, REFUSED),
    "a recorded step that is a pipe": (pipe("step.json"), TRACE, REFUSED),
    "deep words": (put("x", ""), train("--dry-run", "--optimizer.groups", "[" * 100_000), REFUSED),
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts for it, and a run of six steps with the command that goes on with it."""
    folder = tmp_path_factory.mktemp("originals") / "inside"
    folder.mkdir()
    make_model("llama").save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    assert main(["train", str(write_run(folder, "run", 6)), "--parallel.pp", "1"]) == 0
    return folder


@pytest.fixture
def place(tmp_path: Path, originals: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A copy of the originals, at the same length of path, and a folder outside of it with a secret."""
    p = Place(tmp_path / "inside", tmp_path / "outside")
    shutil.copytree(originals, p.inside)
    settings = (p.inside / "run.toml").read_text().replace("pp = 2", "pp = 1")
    p.put("run.toml", settings.replace(f'"{originals}/run"', f'"{p.run}"'))
    p.outside.mkdir()
    (p.outside / "secret.txt").write_text(SECRET)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make = ResultsFile.__init__

    def remembered(self: ResultsFile, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        names_of_answers.append(self.hidden)

    monkeypatch.setattr(ResultsFile, "__init__", remembered)
    return p


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30


@pytest.mark.shows(155)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_file_neither_runs_nor_reaches_out_nor_ends_in_a_traceback(
    kind: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    act, words, exit_code = KINDS[kind]
    act(place)
    before = files_in(place.outside)
    capfd.readouterr()
    code = main(words(place))
    out, err = capfd.readouterr()
    assert code == exit_code, err
    assert "Traceback" not in err
    last = err.rstrip("\n").rpartition("\n")[2]
    assert code == DONE or (last.startswith("penstock: ") and len(last) < 2500), err
    assert files_in(place.outside) == before, "something outside has been run, written or deleted"
    written = [path.read_bytes() for path in place.inside.rglob("*") if is_small(path)]
    assert not any(SECRET.encode() in content for content in [out.encode(), err.encode(), *written])
    assert not any(b"<script>x()" in page.read_bytes() for page in place.inside.glob("*.html"))


@pytest.mark.shows(155)
def test_the_hostile_files_are_many_and_run_where_they_are_loaded(place: Place) -> None:
    assert len(KINDS) == 74
    for run in (lambda: pickle.loads(place.pickle), lambda: exec(place.python)):
        run()
        (place.outside / "ran").unlink()
    assert os.listdir(place.outside) == ["secret.txt"]
