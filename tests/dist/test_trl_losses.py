"""The losses and gradients of the examples are those of TRL, in one stage and in two; its import takes seconds."""

import importlib.util
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, num_loss_tokens, token_scores
from penstock.settings import LearningRate, OptimizerConfig, OptimizerName
from tests.dist.launch import run_ranks
from tests.hugging_face import SIZES, VOCAB_SIZE, make_model, make_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: it needs newer libraries than Penstock does"
)
EXAMPLES = Path(__file__).parents[2] / "examples"
CLOSE = 1e-5
BETAS = (0.1, 0.7)
# of the answers' draws
TEMPERATURE = 0.8
CLIPS = ((0.2, 0.2, 0.0), (0.1, 0.28, 0.04), (0.02, 0.3, 0.5))
CENTRES = (0.0, 0.2)
LENGTHS = ((3, 5, 2), (1, 4, 9), (7, 1, 1), (2, 6, 3), (4, 2, 8), (1, 1, 6))
"""Of a prompt and its two answers."""

Found = tuple[float, dict[str, Tensor]]
"""A loss, and the gradients by their names in transformers."""


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts() -> list[tuple[list[int], ...]]:
    numbers = random.Random(5)
    return [tuple([numbers.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in three) for three in LENGTHS]


def known(num_tokens: int) -> tuple[list[float], float]:
    """Log-probabilities that an answer of that length had when it was drawn, and its advantage."""
    numbers = random.Random(num_tokens)
    return [-4.5 + numbers.uniform(-0.6, 0.6) for _ in range(num_tokens)], numbers.uniform(-2, 2)


def make_folders(folder: Path) -> None:
    """A model, the reference that it began as, and a model with a head for rewards."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings: dict[str, Any] = {"num_hidden_layers": 2}
    make_model("llama", **settings).save_pretrained(folder / "policy")
    torch.manual_seed(7)
    reference = make_model("llama", **settings)
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    reference.save_pretrained(folder / "reference")
    config = AutoConfig.for_model("llama", **SIZES | settings, num_labels=1)
    reward = AutoModelForSequenceClassification.from_config(config)
    for parameter in reward.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    reward.save_pretrained(folder / "reward")


# ---- ours


def losses_of_engine(rank: int, folder: Path, layout: Layout) -> dict[str, list[Found]]:
    """Each loss of an unchanged model, and this rank's gradients, by the examples' own functions."""
    # A step of that size changes no weight.
    optimizer = OptimizerConfig(LearningRate(1e-30), name=OptimizerName.SGD, clip_norm=0.0, weight_decay=0.0)
    still = EngineOptions(optimizer=optimizer, device="cpu")
    engine = Engine.from_hf(folder / "policy", layout, still)
    reference = Engine.from_hf(folder / "reference", layout, still, learns=False)
    rewards = Engine.from_hf(folder / "reward", layout, still, native="auto")
    parts = MicroBatchSpec(num=3)
    dpo, grpo, reward_model = map(example, ("dpo", "grpo", "reward_model"))
    grpo.TEMPERATURE = TEMPERATURE

    pairs = dpo.with_reference(reference, dpo.batch_of([dpo.Pair(*three) for three in texts()]))
    answers = grpo.batch_of([grpo.Answer(p, a, *known(len(a))) for p, *both in texts() for a in both])
    scores = reference.forward(answers, token_scores(TEMPERATURE), micro_batches=parts, broadcast=True)
    answers = answers.with_key("reference", scores["log_probs"])
    margins = [0.1 * number for number in range(len(LENGTHS))]
    compared = reward_model.batch_of([(p + a, p + b) for p, a, b in texts()], margins)

    def taken(engine: Engine, batch: Any, loss: Any, weight: Any) -> Found:
        result = engine.train_batch(batch, loss, weight, parts)
        form, own = engine.form, engine.parameters()
        assert form is not None
        named = {name: form.names.slices(name, own[name].shape)[0].name for name in own}
        return result.loss, {named[name]: engine.gradient(name).clone() for name in own}

    return {
        "dpo": [taken(engine, pairs, partial(dpo.preference_loss, beta=beta), dpo.num_pairs) for beta in BETAS],
        "grpo": [
            taken(engine, answers, partial(grpo.policy_loss, clip_low=low, clip_high=high, beta=b), num_loss_tokens)
            for low, high, b in CLIPS
        ],
        "reward": [
            taken(rewards, compared, partial(reward_model.comparison_loss, centre=centre), reward_model.num_pairs)
            for centre in CENTRES
        ],
    }


# ---- theirs


def padded(rows: list[list[Any]], value: Any = 0, left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    filled = [[value] * (longest - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for fill, row in zip(filled, rows, strict=True)])


def of_trainer(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> Found:
    """What the trainer's own loss function makes of the inputs."""
    model.zero_grad()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    gradients = {name: own.grad for name, own in model.named_parameters() if own.grad is not None}
    return float(loss.detach()), {name: grad.clone() for name, grad in gradients.items()}


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "bf16": False, **changes}


def of_dpo(folder: Path, tokenizer: Any) -> list[Found]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    model, reference = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "reference"))
    data = Dataset.from_list([{"prompt": "the cat", "chosen": " sat", "rejected": " mat"}])
    config = DPOConfig(**arguments(folder))
    trainer = DPOTrainer(model, reference, config, train_dataset=data, processing_class=tokenizer)
    rows = [{"prompt_ids": p, "chosen_ids": a, "rejected_ids": b} for p, a, b in texts()]
    inputs = DataCollatorForPreference(pad_token_id=0)(rows)
    found = []
    for trainer.beta in BETAS:
        found.append(of_trainer(trainer, model, inputs))
    return found


def of_grpo(folder: Path, tokenizer: Any) -> list[Found]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, reference = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "reference"))
    config = GRPOConfig(**arguments(folder), per_device_train_batch_size=8, num_generations=2, temperature=TEMPERATURE)
    data = Dataset.from_list([{"prompt": "the cat"}] * 8)
    trainer: Any = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, data, processing_class=tokenizer
    )
    answers = [(prompt, answer) for prompt, *both in texts() for answer in both]
    prompts, drawn = [prompt for prompt, _ in answers], [known(len(answer)) for _, answer in answers]
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": padded([answer for _, answer in answers]),
        "completion_mask": padded([[1] * len(answer) for _, answer in answers]),
        "old_per_token_logps": padded([log_probs for log_probs, _ in drawn], 0.0),
        "advantages": torch.tensor([advantage for _, advantage in drawn]),
        "num_items_in_batch": torch.tensor(sum(len(answer) for _, answer in answers)),
    }
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
    with torch.no_grad():
        logits = reference(ids, mask).logits[:, :-1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    inputs["ref_per_token_logps"] = log_probs[:, -inputs["completion_ids"].shape[1] :]
    found = []
    for trainer.epsilon_low, trainer.epsilon_high, trainer.beta in CLIPS:
        found.append(of_trainer(trainer, model, inputs))
    return found


def of_reward(folder: Path, tokenizer: Any) -> list[Found]:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    data = Dataset.from_list([{"chosen": "the cat sat", "rejected": "the mat"}])
    trainer: Any = RewardTrainer(
        model, RewardConfig(**arguments(folder)), train_dataset=data, processing_class=tokenizer
    )
    pairs = [{"chosen_ids": p + a, "rejected_ids": p + b} for p, a, b in texts()]
    rows = [{**pair, "margin": 0.1 * number} for number, pair in enumerate(pairs)]
    inputs = DataCollatorForPreference(pad_token_id=0)(rows)
    found = []
    for trainer.args.center_rewards_coefficient in CENTRES:
        found.append(of_trainer(trainer, model, inputs))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_folders(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Found]]:
    tokenizer = make_tokenizer(folder)
    of = {"dpo": of_dpo, "grpo": of_grpo, "reward": of_reward}
    return {name: function(folder, tokenizer) for name, function in of.items()}


@pytest.mark.shows(124)
@pytest.mark.parametrize("pp", [1, 2])
def test_losses_and_gradients_are_those_of_trl(pp: int, folder: Path, expected: dict[str, list[Found]]) -> None:
    ranks = run_ranks(pp, losses_of_engine, folder, Layout(pp=pp))
    for name, settings in expected.items():
        assert len({loss for loss, _ in settings}) == len(settings), "each setting gives a loss of its own"
        for number, (loss, gradients) in enumerate(settings):
            found: dict[str, Tensor] = {}
            for rank in ranks:
                assert rank[name][number][0] == pytest.approx(loss, abs=CLOSE)
                found |= rank[name][number][1]
            assert found.keys() == gradients.keys()
            for parameter, gradient in gradients.items():
                torch.testing.assert_close(
                    found[parameter], gradient, rtol=CLOSE, atol=CLOSE, msg=f"{name} {parameter}"
                )
                assert gradient.abs().max() > 100 * CLOSE
