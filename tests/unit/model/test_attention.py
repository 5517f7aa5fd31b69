"""Packed attention equals attention sequence by sequence, written out with masks."""

import pytest
import torch

from penstock.model import Sequences
from penstock.model.attention.kernels import AttentionKernel
from tests.attention_reference import PACKINGS, assert_equal_to_masked, inputs, masked_attention


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_output_and_gradients_equal_the_masked_reference(
    lengths: tuple[int, ...], num_kv_heads: int, window: int | None
) -> None:
    assert_equal_to_masked(AttentionKernel(4, num_kv_heads, 8, window), lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_as_good_as_their_rounding(dtype: torch.dtype) -> None:
    qkv = inputs(15, 4, 2, dtype)
    out = AttentionKernel(4, 2, 8).packed(*qkv, Sequences.from_lengths((5, 1, 9)))
    assert out.dtype == dtype
    q, k, v = (x.double() for x in qkv)
    exact = masked_attention(q, k, v, (5, 1, 9), None)
    # Values are of size one; the softmax runs in fp32, its weights and the output are rounded to 16 bit.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_token_never_sees_another_sequence() -> None:
    q, k, v = inputs(12, 2, 2, torch.float32)
    sequences = Sequences.from_lengths((4, 3, 5))
    before = AttentionKernel(2, 2, 8).packed(q, k, v, sequences)
    with torch.no_grad():
        for x in (q, k, v):
            x[4:7] = torch.nan
    after = AttentionKernel(2, 2, 8).packed(q, k, v, sequences)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[7:], after[7:])
    assert after[4:7].isnan().all()


def test_results_depend_on_the_microbatch_alone() -> None:
    q, k, v = inputs(16, 4, 2, torch.float32)
    kernel, sequences = AttentionKernel(4, 2, 8, 3), Sequences.from_lengths((6, 6, 4))
    runs = [kernel.packed(q, k, v, sequences) for _ in range(2)]
    q, k, v = (x.detach().clone() for x in (q, k, v))
    runs.append(kernel.packed(q, k, v, sequences))
    assert all(torch.equal(run, runs[0]) for run in runs)


class TestSequences:
    def test_metadata_of_lengths(self) -> None:
        sequences = Sequences.from_lengths([3, 1, 2])
        assert sequences.lengths == (3, 1, 2)
        assert sequences.cu_seqlens.tolist() == [0, 3, 4, 6]
        assert sequences.cu_seqlens.dtype == torch.int32
        assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
        assert (sequences.max_length, sequences.num_tokens) == (3, 6)

    def test_given_positions_are_kept(self) -> None:
        sequences = Sequences.from_lengths([2, 1], positions=torch.tensor([5, 9, 2], dtype=torch.int32))
        assert sequences.positions.tolist() == [5, 9, 2]
        assert sequences.positions.dtype == torch.int64

    @pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
    def test_impossible_lengths_are_refused(self, lengths: list[int]) -> None:
        with pytest.raises(ValueError, match="at least one"):
            Sequences.from_lengths(lengths)

    def test_positions_of_another_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"\(2,\).*3"):
            Sequences.from_lengths([3], positions=torch.zeros(2))

    def test_what_layers_share_is_made_once_for_each_object(self) -> None:
        made = []
        first, second = Sequences.from_lengths([3]), Sequences.from_lengths([3])
        for sequences in (first, first, second):
            sequences.shared("key", lambda: made.append(1))
        assert len(made) == 2
