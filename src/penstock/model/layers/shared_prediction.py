"""The head that predicts further tokens, for ranks that share it: each holds a run of the tokens between the products.

    for each further token: look up | sum and scatter | join the stream with that token's predecessor | a layer
    then norms | gather | this rank's part of the logits, and beside them the loss of each prediction

The streams of all predictions are gathered together with the main one. See `penstock.model.layers.multi_token`, whose
parameters' names these are, and `penstock.model.layers.tensor_parallel`.

Shapes: T tokens of the microbatch, P ranks that share the head, S tokens of one rank, D hidden size, V vocabulary,
K streams.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from penstock.model.aux_losses import LossTerms, Term
from penstock.model.layers.moe import ExpertHalf
from penstock.model.layers.norm import RMSNorm
from penstock.model.layers.tensor_parallel import Peers, SharedAttentionHalf, SharedEmbedding, SharedHead, SharedMLPHalf
from penstock.model.linear import Linear
from penstock.model.loss import cross_entropy_sum
from penstock.model.matmul import Products
from penstock.model.segments import Beside, Compute, Segment, SegmentedUnit, State
from penstock.model.sequences import Sequences
from penstock.model.sharded_logits import ShardedLogits


class SharedPrediction(nn.Module):
    """One further token, from this rank's tokens of the stream [S, D] to the next ones; joined tokens by tokens.

    Each rank joins its own tokens with the whole weight. What pads the last run is zero, and stays zero.
    """

    def __init__(self, peers: Peers, products: Products) -> None:
        super().__init__()
        config, last = peers.config, peers.config.num_layers - 1
        of_layer = Peers(config.of_layer(last), peers.groups)
        self.stream_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.join = Linear(2 * config.hidden_size, config.hidden_size, products=products)
        self.attention = SharedAttentionHalf(of_layer, products)
        sparse = config.is_sparse(last)
        self.mlp: SegmentedUnit = (
            ExpertHalf(config, products, peers.groups) if sparse else SharedMLPHalf(of_layer, products)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def segments(self, embedding: SharedEmbedding, tokens_T: Tensor, sequences: Sequences) -> list[Segment]:
        """The row from the stream to the one that the token, and the next prediction, are predicted from."""

        def look_up(h_SD: Tensor) -> State:
            return *embedding.look_up(tokens_T), h_SD

        def join(embedded_SD: Tensor, h_SD: Tensor) -> State:
            return (self.join(torch.cat((self.stream_norm(h_SD), self.token_norm(embedded_SD)), -1)),)

        return [
            Compute("look up", look_up),
            embedding.scatter(),
            Compute("join", join),
            *self.attention.segments(sequences),
            *self.mlp.segments(sequences),
        ]


class SharedPredictingHead(SharedHead):
    """This rank's tokens of the stream [S, D] -> its part of the logits [T, part of V], with the predictions' losses.

    `embedding` is a tied copy of this rank's part of the model's, and a tied projection another.
    """

    def __init__(self, peers: Peers, products: Products) -> None:
        super().__init__(peers, products)
        config = peers.config
        self.loss_weight = config.prediction_loss / config.num_predictions
        self.embedding = SharedEmbedding(peers, products)
        self.predictions = nn.ModuleList(SharedPrediction(peers, products) for _ in range(config.num_predictions))

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        terms = sequences.terms
        if terms is None or not terms.ahead:
            return super().segments(sequences)
        assert len(terms.ahead) == len(self.predictions)
        row: list[Segment] = []
        for number, (prediction, ahead) in enumerate(zip(self.predictions, terms.ahead, strict=True)):
            keep = Compute("keep the stream", lambda h_SD: (h_SD, h_SD))
            row.append(Beside(keep, number) if number else keep)
            assert isinstance(prediction, SharedPrediction)
            layer = prediction.segments(self.embedding, ahead.tokens_T, sequences)
            row += [Beside(segment, number + 1) for segment in layer]
        logits = Compute("logits", partial(self._logits, terms, sequences.num_tokens))
        return [*row, Compute("norms", self._norms), self.gather(), logits]

    def _norms(self, *streams: Tensor) -> State:
        """All streams normalised, one behind the other [K S, D]: the model's own, then the predictions'."""
        normalised = [self.norm(streams[-1])]
        for prediction, h_SD in zip(self.predictions, streams[-2::-1], strict=True):
            assert isinstance(prediction, SharedPrediction)
            normalised.append(prediction.norm(h_SD))
        return (torch.cat(normalised),)

    def _logits(self, terms: LossTerms, num_tokens: int, gathered: Tensor) -> State:
        num_streams = len(self.predictions) + 1
        of_ranks = gathered.unflatten(0, (self.collectives.size, num_streams, -1))
        h_TD, *ahead = of_ranks.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        logits_TU = self.projection(h_TD)
        for prediction, own_TD, target in zip(self.predictions, ahead, terms.ahead, strict=True):
            sharded = ShardedLogits(self.projection(own_TD), self.part, self.collectives)
            term = cross_entropy_sum(sharded, target.labels_T) * (terms.factor * self.loss_weight)
            # The term is the same on all ranks.
            logits_TU = terms.add(logits_TU, term, prediction, Term.PREDICTION, self.collectives.size)
        return (logits_TU,)
