"""The head of a model that also predicts tokens further ahead, each through one more layer, while it learns.

    for each further token: join the stream with that token's predecessor | a layer
    then the logits, and beside them the loss of each prediction

What layer k has made is the stream that layer k + 1 starts from. Embedding and projection are those of the model, so
all of it is one unit, on the stage of the head. Where nothing is learned only the logits are computed.

Shapes: T tokens, D hidden size, V vocabulary.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.aux_losses import LossTerms, Term
from penstock.model.config import ModelConfig
from penstock.model.groups import ModelGroups
from penstock.model.layers.attention import AttentionHalf, ContextAttentionHalf, Embedding, Head, MLPHalf
from penstock.model.layers.moe import ExpertHalf
from penstock.model.layers.norm import RMSNorm
from penstock.model.linear import Linear
from penstock.model.loss import cross_entropy_sum
from penstock.model.matmul import Products
from penstock.model.segments import Beside, Compute, Segment, SegmentedUnit, State
from penstock.model.sequences import Sequences


class Prediction(nn.Module):
    """One further token: the stream and the token before that one, each normalised, joined and sent through a layer."""

    def __init__(self, config: ModelConfig, products: Products, groups: ModelGroups) -> None:
        super().__init__()
        last = config.num_layers - 1
        self.stream_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.join = Linear(2 * config.hidden_size, config.hidden_size, products=products)
        if groups.cp is None or groups.tp is not None:
            self.attention: nn.Module = AttentionHalf(config.of_layer(last), products)
        else:
            self.attention = ContextAttentionHalf(config.of_layer(last), products, groups)
        sparse = config.is_sparse(last)
        self.mlp: nn.Module = ExpertHalf(config, products, groups) if sparse else MLPHalf(config, products)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def segments(self, table_VD: nn.Parameter, tokens_T: Tensor, sequences: Sequences) -> list[Segment]:
        """The row from the stream to the one that the token, and the next prediction, are predicted from."""

        def join(h_TD: Tensor) -> State:
            embedded_TD = F.embedding(tokens_T, table_VD)
            return (self.join(torch.cat((self.stream_norm(h_TD), self.token_norm(embedded_TD)), -1)),)

        row: list[Segment] = [Compute("join", join)]
        for half in (self.attention, self.mlp):
            row += half.segments(sequences) if isinstance(half, SegmentedUnit) else [_whole(half, sequences)]
        return row


def _whole(half: nn.Module, sequences: Sequences) -> Segment:
    return Compute("half", lambda x_TD: (half(x_TD, sequences),))


class PredictingHead(SegmentedUnit, Head):
    """Residual stream [T, D] -> logits [T, V], on which the losses of the predictions hang.

    `embedding` is a tied copy of the model's, and a tied projection another: their gradients come at different times.
    """

    def __init__(self, config: ModelConfig, products: Products, groups: ModelGroups) -> None:
        super().__init__(config, products)
        self.loss_weight = config.prediction_loss / config.num_predictions
        self.embedding = Embedding(config)
        self.predictions = nn.ModuleList(Prediction(config, products, groups) for _ in range(config.num_predictions))

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        terms = sequences.terms
        if terms is None or not terms.ahead:
            return [Compute("head", lambda x_TD: (Head.forward(self, x_TD, sequences),))]
        assert len(terms.ahead) == len(self.predictions)
        # The newest stream stands first; it is kept for its logits when the next one starts from it.
        row: list[Segment] = []
        for number, (prediction, ahead) in enumerate(zip(self.predictions, terms.ahead, strict=True)):
            keep = Compute("keep the stream", lambda h_TD: (h_TD, h_TD))
            row.append(Beside(keep, number) if number else keep)
            assert isinstance(prediction, Prediction)
            layer = prediction.segments(self.embedding.weight, ahead.tokens_T, sequences)
            row += [Beside(segment, number + 1) for segment in layer]
        # One segment for all uses of the projection, whose gradients add up in one order then, now or later.
        return [*row, Compute("head", partial(self._logits, terms, sequences))]

    def _logits(self, terms: LossTerms, sequences: Sequences, *streams: Tensor) -> State:
        *ahead, x_TD = streams
        logits_TV = Head.forward(self, x_TD, sequences)
        for prediction, h_TD, target in zip(self.predictions, reversed(ahead), terms.ahead, strict=True):
            assert isinstance(prediction, Prediction)
            total = cross_entropy_sum(self.projection(prediction.norm(h_TD)), target.labels_T)
            term = total * (terms.factor * self.loss_weight)
            logits_TV = terms.add(logits_TV, term, prediction, Term.PREDICTION)
        return (logits_TV,)
