"""What attention asks of a GPU's flash kernels, with a formula in their place: values, gradients, numbers of calls."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.model import Sequences, decoder_units
from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cuda.flash import FlashAttention
from penstock.model.devices import use_kernels_of
from penstock.model.layers.dense import AttentionBlock
from penstock.settings import ModelConfig
from tests import flash_reference
from tests.attention_reference import masked_attention
from tests.unit.model.test_attention import PACKINGS, inputs


class Flash(FlashAttention):
    """Takes any dtype, as the formula does."""

    def takes(self, dtype: torch.dtype) -> bool:
        return True


@pytest.fixture(autouse=True)
def formula() -> Iterator[None]:
    with flash_reference.on_the_cpu():
        yield


@pytest.mark.shows(207)
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_output_and_gradients_equal_the_masked_reference(
    lengths: tuple[int, ...], num_kv_heads: int, window: int | None
) -> None:
    qkv = inputs(sum(lengths), 4, num_kv_heads, torch.float64)
    weights = torch.linspace(-1, 1, sum(lengths) * 32, dtype=torch.float64).view(-1, 4, 8)
    out = Flash(4, num_kv_heads, 8, window).packed(*qkv, Sequences.from_lengths(lengths))
    expected = masked_attention(*qkv, lengths, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out, qkv, weights)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, qkv, weights), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


class Attentions(TorchDispatchMode):
    """Counts attentions by operation and the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        # The plain formula, which PyTorch takes where no kernel does, ends in a softmax.
        if "attention" in name or name in ("_softmax", "_safe_softmax"):
            self.shapes[name, *(tuple(x.shape) for x in args if isinstance(x, Tensor))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> Counter[str]:
        names: Counter[str] = Counter()
        for (name, *_), count in self.shapes.items():
            names[name] += count
        return names


def block(head_dim: int = 64, window: int | None = None) -> AttentionBlock:
    """A layer of attention in 16 bit, without data."""
    config = ModelConfig(32, 2 * head_dim, 64, 1, 2, num_kv_heads=1, max_length=512, sliding_window=window)
    with torch.device("meta"):
        (module,) = (m for m in (unit.build() for unit in decoder_units(config)) if isinstance(m, AttentionBlock))
    return module.to(torch.bfloat16)


@pytest.mark.shows(207)
@pytest.mark.parametrize("window", [None, 100])
def test_a_microbatch_of_many_lengths_is_one_call_each_way(window: int | None) -> None:
    module = block(window=window)
    use_kernels_of(torch.device("meta"), module)
    lengths = (100, 200, 70, 50, 51, 300, 64, 64, 33, 1)
    x = torch.zeros(sum(lengths), 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Attentions() as attentions:
        module(x, Sequences.from_lengths(lengths, "meta")).sum().backward()
    assert attentions.names == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}


@pytest.mark.shows(207)
def test_widths_and_dtypes_that_the_kernels_do_not_take_stay_with_pytorch() -> None:
    for module, dtype in ((block(12), torch.bfloat16), (block(264), torch.bfloat16), (block(), torch.float32)):
        use_kernels_of(torch.device("meta"), module.to(dtype))
        x = torch.zeros(9, module.q.weight.shape[1], dtype=dtype, device="meta")
        with Attentions() as attentions:
            assert module(x, Sequences.from_lengths((4, 5), "meta")).dtype == dtype
        assert attentions.names and "_flash_attention_forward" not in attentions.names


@pytest.mark.shows(207)
@pytest.mark.parametrize(("capability", "kind"), [((7, 5), AttentionKernel), ((9, 0), FlashAttention)])
def test_on_a_gpu_that_has_them_flash_kernels_are_chosen_and_cudnn_never_is(
    capability: tuple[int, int], kind: type[AttentionKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module, before = block(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        use_kernels_of(torch.device("cuda", 0), module)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert type(module.attention) is kind
    assert (module.attention.num_heads, module.attention.num_kv_heads, module.attention.head_dim) == (2, 1, 64)
