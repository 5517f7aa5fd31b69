"""`penstock generate` and `penstock score` write the same log-probabilities, bit for bit, where they are asked to."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from tests.hugging_face import make_model, make_tokenizer

PROMPTS = [[5, 6, 7], [9], list(range(10, 50))]


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.shows(128)
def test_scores_are_the_log_probabilities_of_generation_to_the_bit(tmp_path: Path) -> None:
    model, same = tmp_path / "model", ("--reproducible", "true", "--device", "cpu")
    make_model("llama", vocab_size=300, max_position_embeddings=128).save_pretrained(model)
    make_tokenizer(model)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in PROMPTS))
    asked = [str(model), "--file", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    assert main(["generate", *asked, "--max-new-tokens", "50", *same]) == 0
    answers = written(tmp_path / "answers.jsonl")
    texts = [{"prompt": PROMPTS[n], "completion": answer["tokens"]} for n, answer in enumerate(answers)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert main(["score", str(model), str(tmp_path / "texts.jsonl"), *same]) == 0
    scores = written(tmp_path / "texts.scores.jsonl")
    for answer, score in zip(answers, scores, strict=True):
        assert score["log_probs"][-len(answer["tokens"]) :] == answer["log_probs"]
        assert len(answer["log_probs"]) > 5


def test_what_cannot_have_the_same_bits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("mistral", sliding_window=4).save_pretrained(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    words = ["score", str(tmp_path), str(tmp_path / "texts.jsonl"), "--reproducible", "true", "--device", "cpu"]
    assert main(words) == 2
    assert "reproducible = true: layers.0.attention sees the last 4 tokens alone" in capsys.readouterr().err
    assert not (tmp_path / "texts.scores.jsonl").exists()
