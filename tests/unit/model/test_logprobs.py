"""Log-probabilities and entropies: values and gradients of autograd's own, and never a copy of the logits.

Shapes: T tokens, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.model import loss, token_log_probs, token_statistics
from penstock.model.loss import IGNORED

T, V = 37, 50


@pytest.fixture(params=[1, 4, 1000], ids="rows of a block {}".format)
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits into a block, the last one is rarely full."""
    monkeypatch.setattr(loss, "_CPU_BLOCK_ELEMENTS", request.param * V)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits_TV = torch.randn(T, V, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels_T = torch.randint(0, V, (T,), generator=generator)
    labels_T[::5] = IGNORED
    return logits_TV, labels_T


def plain(logits_TV: Tensor, labels_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The formulas, written down."""
    log_p_TV = (logits_TV.double() / temperature).log_softmax(-1)
    log_probs_T = log_p_TV.gather(1, labels_T.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(labels_T == IGNORED, 0.0, log_probs_T), -(log_p_TV.exp() * log_p_TV).sum(-1)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_the_formulas(dtype: torch.dtype, temperature: float) -> None:
    logits_TV, labels_T = given(dtype)
    log_probs_T, entropies_T = token_statistics(logits_TV, labels_T, temperature)
    expected = plain(logits_TV, labels_T, temperature)
    assert log_probs_T.dtype is entropies_T.dtype is torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close((log_probs_T, entropies_T), expected, check_dtype=False)
    assert torch.equal(token_log_probs(logits_TV, labels_T, temperature), log_probs_T)
    assert log_probs_T[labels_T == IGNORED].eq(0).all() and log_probs_T[labels_T != IGNORED].lt(0).all()


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("terms", ["log_probs", "entropies", "both"])
def test_gradients_are_those_of_autograd(terms: str, temperature: float) -> None:
    found, expected = (given(torch.float64)[0].requires_grad_() for _ in range(2))
    labels_T = given(torch.float64)[1]
    weights_T = torch.randn(T, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def objective(log_probs_T: Tensor, entropies_T: Tensor) -> Tensor:
        policy = (torch.exp(log_probs_T) * weights_T).sum() if terms != "entropies" else log_probs_T.new_zeros(())
        return policy + (weights_T * entropies_T).sum() if terms != "log_probs" else policy

    if terms == "log_probs":
        objective(token_log_probs(found, labels_T, temperature), torch.empty(0)).backward()
    else:
        objective(*token_statistics(found, labels_T, temperature)).backward()
    objective(*plain(expected, labels_T, temperature)).backward()
    assert expected.grad is not None and expected.grad.abs().max() > 1e-3
    torch.testing.assert_close(found.grad, expected.grad)


def test_a_token_that_cannot_come_adds_nothing() -> None:
    logits_TV, labels_T = given(torch.float64)
    labels_T[labels_T == 7] = 8
    without = logits_TV[:, torch.arange(V) != 7].requires_grad_()
    masked = logits_TV.index_fill(1, torch.tensor([7]), float("-inf")).requires_grad_()
    moved_T = torch.where(labels_T > 7, labels_T - 1, labels_T)
    for found, expected in zip(token_statistics(masked, labels_T), token_statistics(without, moved_T), strict=True):
        torch.testing.assert_close(found, expected)
    sum(token_statistics(masked, labels_T)).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    sum(token_statistics(without, moved_T)).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert masked.grad is not None and without.grad is not None
    torch.testing.assert_close(masked.grad[:, torch.arange(V) != 7], without.grad)
    assert masked.grad[:, 7].eq(0).all()


class _Largest(TorchDispatchMode):
    """Notes the most elements of any new fp32 tensor."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_no_fp32_copy_of_the_logits_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_CPU_BLOCK_ELEMENTS", 4 * V)
    logits_TV, labels_T = given(torch.bfloat16)
    logits_TV.requires_grad_()
    with _Largest() as largest:
        log_probs_T, entropies_T = token_statistics(logits_TV, labels_T)
        (log_probs_T.sum() + entropies_T.sum()).backward()
    assert logits_TV.grad is not None and logits_TV.grad.dtype is torch.bfloat16
    assert T < largest.num_elements <= 4 * V


def test_nothing_but_the_logits_is_kept_for_the_backward() -> None:
    logits_TV, labels_T = given(torch.float32)
    logits_TV.requires_grad_()
    log_probs_T = token_statistics(logits_TV, labels_T).log_probs
    saved = log_probs_T.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert max(x.numel() for x in saved if x.data_ptr() != logits_TV.data_ptr()) == T
