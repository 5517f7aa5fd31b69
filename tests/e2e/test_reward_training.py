"""Training a reward model from the command line: TRL's losses, the same bits in stages, and a folder that rates."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from penstock.cli.main import main
from penstock.data import DataShard
from penstock.engine.folders.runs import METRICS_FILE, RUN_FILE, read_metrics
from penstock.engine.run_data import RunData
from penstock.settings import read_config
from tests.chat import LLAMA3, assistant, user
from tests.e2e.training import exact_metrics, run
from tests.hugging_face import SIZES, make_tokenizer

CLOSE = 1e-4
STEPS, RATE = 6, 1e-2
ANIMALS = ("cat", "mat", "user", "other")
NUMBERS = range(3)
FORMS: dict[str, list[dict[str, Any]]] = {
    "texts with a prompt": [
        {"prompt": f"what said the {animal} {n}?", "chosen": f" {animal}" * (n + 1), "rejected": " so"}
        for n in NUMBERS
        for animal in ANIMALS
    ],
    "messages": [
        {
            "chosen": [user(f"the {animal} {n}"), assistant(animal * (n + 1))],
            "rejected": [user(f"the {animal} {n}"), assistant("so")],
        }
        for n in NUMBERS
        for animal in ANIMALS
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose texts are padded with the token that ends them, as many models' are."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **SIZES | {"vocab_size": 300, "pad_token_id": 2}, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    make_tokenizer(folder, chat_template=LLAMA3, pad_token="</s>")
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words(base: Path, corpus: Path, output: Path, pp: int) -> list[str]:
    return [
        *("--model.pretrained", str(base), "--data.corpus", str(corpus), "--output", str(output)),
        *("--parallel.pp", str(pp), "--parallel.timeout_s", "60", "--parallel.device", "cpu"),
        *("--data.cache", str(output.with_name("cache"))),
        *("--train.steps", str(STEPS), "--train.num_microbatches", "2", "--data.num_sequences", "4"),
        *("--data.validation_fraction", "0.25", "--validation.every", "3", "--checkpoint.every", "0"),
        *("--optimizer.learning_rate", str(RATE), "--optimizer.decay", "constant", "--optimizer.weight_decay", "0"),
        *("--log.timeline", "false", "--log.tensorboard", "false"),
    ]


def losses_of_trl(base: Path, rows: list[dict[str, Any]], output: Path) -> Iterator[float]:
    """The loss of each step of a loop with TRL's token ids, collator and loss on the same pairs."""
    pytest.importorskip("trl", reason="TRL is not installed: it needs newer libraries than Penstock does")
    from datasets import Dataset
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    config = read_config(output / RUN_FILE)
    batches, rule = RunData.load(config).loader(DataShard()), config.optimizer
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    arguments = RewardConfig(
        output_dir=str(output / "trl"), use_cpu=True, report_to="none", bf16=False, disable_tqdm=True, max_length=None
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    trainer = RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    examples: list[Any] = list(trainer.train_dataset)  # pyright: ignore
    by_tokens = {(*one["chosen_ids"], -1, *one["rejected_ids"]): one for one in examples}
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (rule.beta1, rule.beta2), weight_decay=0.0)
    for _ in range(STEPS):
        batch = next(batches)
        texts = [own.tolist() for own in batch["tokens"].split(batch.sequence_lengths())]
        theirs = [by_tokens[*texts[n], -1, *texts[n + 1]] for n in range(0, len(texts), 2)]
        optimizer.zero_grad()
        loss: Any = trainer.compute_loss(model, trainer.data_collator(theirs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rule.clip_norm)
        optimizer.step()
        yield float(loss.detach())


@pytest.fixture(scope="module")
def run_of(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run in one process on pairs of a form, which lie beside it."""
    root = tmp_path_factory.mktemp("runs")

    def train(form: str) -> Path:
        folder = root / form.replace(" ", "-")
        if not folder.exists():
            folder.mkdir()
            corpus = write(folder / "pairs.jsonl", FORMS[form])
            with contextlib.redirect_stdout(io.StringIO()) as told:
                assert main(["train", *words(base, corpus, folder / "run", 1)]) == 0
            assert "nats a pair" in told.getvalue()
        return folder / "run"

    return train


@pytest.mark.shows(130)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_has_the_losses_of_trl(form: str, base: Path, run_of: Callable[[str], Path]) -> None:
    found = read_metrics(run_of(form) / METRICS_FILE)
    losses = [entry["loss"] for entry in found if "loss" in entry]
    assert losses == pytest.approx(list(losses_of_trl(base, FORMS[form], run_of(form))), abs=CLOSE)
    assert losses[-1] < losses[0] - 0.02
    assert len([entry for entry in found if "validation_loss" in entry]) == 2


@pytest.mark.shows(130)
def test_two_stages_train_a_reward_model_to_the_same_bits(base: Path, run_of: Callable[[str], Path]) -> None:
    alone = run_of("messages")
    ended = run(*words(base, alone.with_name("pairs.jsonl"), alone.with_name("staged"), 2))
    assert ended.exit_code == 0, ended.err
    assert len(exact_metrics(alone)) > STEPS
    assert exact_metrics(alone) == exact_metrics(alone.with_name("staged"))


def test_a_trained_reward_model_rates_texts_here_and_in_transformers(
    base: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    output = run_of("texts with a prompt")
    texts = write(tmp_path / "texts.jsonl", [{"text": f"the {animal}</s>"} for animal in ANIMALS])
    assert main(["score", str(output), str(texts)]) == 0
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "texts.scores.jsonl").read_text().splitlines()]
    assert main(["convert", str(output), str(tmp_path / "hf")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    before = AutoModelForSequenceClassification.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for animal, reward in zip(ANIMALS, rewards, strict=True):
        tokens = tokenizer(f"the {animal}</s>", return_tensors="pt").input_ids
        assert reward == pytest.approx(float(model(tokens).logits), abs=1e-5)
        assert abs(reward - float(before(tokens).logits)) > 1e-3


def test_what_gives_no_pairs_or_learns_from_none_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat")
    corpus = write(tmp_path / "pairs.jsonl", FORMS["texts with a prompt"])
    for given, more, told in (
        (tmp_path / "a.txt", [], "has no rows; examples are in files that end in"),
        (corpus, ["--adapter.rank", "4"], "a reward model is trained whole; leave the settings of adapter out"),
        (corpus, ["--data.cross_documents", "true"], "but examples and pairs are never packed across documents"),
    ):
        assert main(["train", *words(base, given, tmp_path / "run", 1), *more]) == 2
        assert told in capsys.readouterr().err
    write(corpus, FORMS["texts with a prompt"][:1])
    assert main(["train", *words(base, corpus, tmp_path / "run", 1)]) == 2
    assert "holds one example; for validation give another file" in capsys.readouterr().err
