"""Multi-token prediction: a head that in training also predicts tokens further ahead, each through one more layer.

    for each further token: look up that token's predecessor | join it with the stream | attention | mlp
    then the logits, and beside them the loss of each prediction

Layer k's output is the stream that layer k + 1 starts from. Embedding and projection are the model's own, so everything
is one unit, on the head's stage. Outside of training only the logits are computed.

Under tensor parallelism each rank joins its own tokens with the whole weight, and the streams of all predictions are
gathered together with the main one. The padding of the last rank's run stays zero.

Shapes: T tokens of the microbatch, P ranks of the tensor-parallel group, S tokens of one rank, D hidden size, V
vocabulary, U this rank's part of it, K streams.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from penstock.model.lanes import Compute, Segment, SegmentedUnit, State, beside
from penstock.model.layers.dense import AttentionBlock, Embedding, Head, MLPBlock, RMSNorm
from penstock.model.layers.experts import ExpertBlock
from penstock.model.layers.tensor_parallel import TensorParallelEmbedding, TensorParallelHead, unit_in_groups
from penstock.model.linear import Linear, Matmul
from penstock.model.loss import ShardedLogits, cross_entropy_sum
from penstock.model.sequences import AuxLoss, AuxLosses, FutureTokens, Sequences, only_read
from penstock.model.units import ModelGroups
from penstock.settings import ModelConfig


class TokenPrediction(nn.Module):
    """One further token: the stream and that token's predecessor, normalised, joined and sent through a layer."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__()
        last = config.num_layers - 1
        layer = config.of_layer(last)
        self.stream_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.join = Linear(2 * config.hidden_size, config.hidden_size, matmul=matmul)
        self.attention = unit_in_groups(AttentionBlock, (layer, matmul), groups)
        if config.is_sparse(last):
            self.mlp = ExpertBlock(config, matmul, groups)
        else:
            self.mlp = unit_in_groups(MLPBlock, (layer, matmul), groups)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def segments(self, embedding: Embedding, tokens_T: Tensor, sequences: Sequences) -> list[Segment]:
        """The row from the stream to the one that the token, and the next prediction, are predicted from."""

        cut = embedding if isinstance(embedding, TensorParallelEmbedding) else None

        def look_up(h: Tensor) -> State:
            rows = embedding.embedded(tokens_T)
            return rows if cut is None else cut.padded(rows), h

        def join(embedded: Tensor, h: Tensor) -> State:
            return (self.join(torch.cat((self.stream_norm(h), self.token_norm(embedded)), -1)),)

        exchanges = [] if cut is None else [cut.scatter()]
        row: list[Segment] = [Compute("look up", look_up), *exchanges, Compute("join", join)]
        for block in (self.attention, self.mlp):
            row += block.segments(sequences) if isinstance(block, SegmentedUnit) else [_whole(block, sequences)]
        return row


def _whole(block: nn.Module, sequences: Sequences) -> Segment:
    return Compute("block", lambda x_TD: (block(x_TD, sequences),))


class TokenPredictions(nn.ModuleList):
    """All further tokens' predictions, one after the other."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__(TokenPrediction(config, matmul, groups) for _ in range(config.num_predictions))
        self.loss_weight = config.prediction_loss / config.num_predictions

    def __iter__(self) -> Iterator[TokenPrediction]:
        return cast(Iterator[TokenPrediction], super().__iter__())

    def segments(self, embedding: Embedding, targets: Sequence[FutureTokens], sequences: Sequences) -> list[Segment]:
        """The row from the model's stream to a state of all streams, the newest first and the model's own last."""
        assert len(targets) == len(self)
        row: list[Segment] = []
        for number, (prediction, target) in enumerate(zip(self, targets, strict=True)):
            # Keep a stream for its logits when the next one starts from it.
            row.append(Compute("keep the stream", lambda h: (h, h), num_beside=number))
            layer = prediction.segments(embedding, target.tokens_T, sequences)
            row += [beside(segment, number + 1) for segment in layer]
        return row


class MultiTokenHead(SegmentedUnit, Head):
    """Residual stream [T, D] -> logits [T, V], to which the losses of the predictions are attached.

    `embedding` is a tied copy of the model's, and a tied projection another: their gradients come at different times.
    """

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__(config, matmul)
        self.embedding = Embedding(config)
        self.predictions = TokenPredictions(config, matmul, groups)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        aux_losses = sequences.aux_losses
        if aux_losses is None or not sequences.ahead:
            return [Compute("head", lambda x_TD: (Head.forward(self, x_TD, sequences),))]
        # One segment for all uses of the projection, so that its gradients add up in one order, deferred or not.
        head = Compute("head", partial(self._logits, aux_losses, sequences))
        return [*self.predictions.segments(self.embedding, sequences.ahead, sequences), head]

    def _logits(self, aux_losses: AuxLosses, sequences: Sequences, *streams: Tensor) -> State:
        *ahead, x_TD = streams
        logits_TV = Head.forward(self, x_TD, sequences)
        for prediction, h_TD, target in zip(self.predictions, reversed(ahead), sequences.ahead, strict=True):
            logits_RV = self.projection(prediction.norm(only_read(h_TD, target.read_rows)))
            total = cross_entropy_sum(logits_RV, target.labels_T)
            loss = total * (aux_losses.factor * self.predictions.loss_weight)
            logits_TV = aux_losses.add(logits_TV, loss, prediction, AuxLoss.PREDICTION)
        return (logits_TV,)


class TensorParallelMultiTokenHead(TensorParallelHead):
    """This rank's tokens of the stream [S, D] -> its part of the logits [T, U], with the losses of the predictions.

    `embedding` is a tied copy of this rank's part of the model's, and a tied projection another.
    """

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__(config, matmul, groups)
        self.embedding = TensorParallelEmbedding(config, groups)
        self.predictions = TokenPredictions(config, matmul, groups)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        aux_losses = sequences.aux_losses
        if aux_losses is None or not sequences.ahead:
            return super().segments(sequences)
        norms, logits = Compute("norms", self._norms), Compute("logits", partial(self._logits, aux_losses, sequences))
        return [*self.predictions.segments(self.embedding, sequences.ahead, sequences), norms, self.gather(), logits]

    def _norms(self, *streams: Tensor) -> State:
        """All streams normalised and concatenated [K S, D]: the model's own, then the predictions'."""
        normalised = [self.norm(streams[-1])]
        normalised += [
            prediction.norm(h_SD) for prediction, h_SD in zip(self.predictions, streams[-2::-1], strict=True)
        ]
        return (torch.cat(normalised),)

    def _logits(self, aux_losses: AuxLosses, sequences: Sequences, gathered: Tensor) -> State:
        of_ranks = gathered.unflatten(0, (self.collectives.size, len(self.predictions) + 1, -1))
        h_TD, *ahead = of_ranks.transpose(0, 1).flatten(1, 2)[:, : sequences.num_tokens]
        logits_TU = self.projection(only_read(h_TD, sequences.read_rows))
        for prediction, own_TD, target in zip(self.predictions, ahead, sequences.ahead, strict=True):
            own_RU = self.projection(only_read(own_TD, target.read_rows))
            sharded = ShardedLogits(own_RU, self.part, self.collectives)
            loss = cross_entropy_sum(sharded, target.labels_T) * (aux_losses.factor * self.predictions.loss_weight)
            # All ranks compute the same loss.
            logits_TU = aux_losses.add(logits_TU, loss, prediction, AuxLoss.PREDICTION, self.collectives.size)
        return (logits_TU,)


def multi_token_head(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> Head:
    """The head that predicts further tokens, in the form that these groups need."""
    if groups.tp is None:
        return MultiTokenHead(config, matmul, groups)
    return TensorParallelMultiTokenHead(config, matmul, groups)
