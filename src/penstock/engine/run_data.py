"""A run's data: its corpus, packed into batches to train on and to validate with."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.data import (
    Corpus,
    CorpusSpec,
    DataShard,
    DocumentPacking,
    Loader,
    PackedBatch,
    WindowPacking,
    load_corpus,
    pack,
    validation_batches,
)
from penstock.data.corpus import TokenStore
from penstock.data.loader import PairPacking
from penstock.engine.folders.model_folder import open_folder
from penstock.engine.folders.runs import tokenizer_of
from penstock.engine.training.loss import (
    LossFn,
    LossWeightFn,
    comparison_loss,
    num_loss_tokens,
    num_pairs,
    token_cross_entropy,
)
from penstock.settings import ConfigError, RunConfig

# Items that are searched for the largest batch.
_MOST_COUNTED = 1 << 20


@dataclass(frozen=True)
class RunData:
    """A run's corpus, packed: endless training batches, and the fixed batches of validation.

    rewards: True if its items are pairs of texts, from which a reward model learns.
    """

    config: RunConfig
    corpus: Corpus
    rewards: bool = False

    @classmethod
    def load(cls, config: RunConfig) -> "RunData":
        """Read the corpus, from the cache if it has been tokenised before.

        Raises: ValueError if it is missing, too short for an item, or holds a token outside the model's vocabulary.
        """
        data, source, reward_model = config.data, config.model.pretrained, None
        if source is not None and config.model.native is False:
            folder = open_folder(source, native=False)
            reward_model = folder if folder.is_reward_model else None
        spec = CorpusSpec(
            replace(data, tokenizer=tokenizer_of(config)),
            ends_rows=config.model.pretrained is not None and data.end_token is None,
            max_example_tokens=config.model.max_length,
            pairs=reward_model is not None,
            pad_token=None if reward_model is None else reward_model.pad_token,
        )
        corpus = load_corpus(spec, None if data.cache is None else Path(data.cache).expanduser())
        corpus.check_vocabulary(config.model.vocab_size or corpus.vocab_size)
        run = cls(config, corpus, rewards=reward_model is not None)
        # Both are packed once here, so that too little text is refused before anything starts.
        run.loader(DataShard(), with_data=False)
        run.validation(DataShard(0, config.parallel.dp), with_data=False)
        return run

    def loader(self, shard: DataShard, with_data: bool = True) -> Loader:
        """This data-parallel rank's training batches, one a step."""
        return Loader(
            self._pack(self.corpus.training),
            self._batch_items,
            seed=self.config.train.seed,
            shard=shard,
            with_data=with_data,
        )

    def validation(self, shard: DataShard, with_data: bool = True) -> tuple[PackedBatch, ...]:
        """This data-parallel rank's validation batches; empty if no text is set aside for validation."""
        if self.corpus.validation is None:
            return ()
        return validation_batches(
            self._pack(self.corpus.validation),
            self._batch_items,
            max_items=self.config.validation.num_sequences,
            shard=shard,
            with_data=with_data,
        )

    def fullest_lengths(self) -> list[int]:
        """The lengths of a data-parallel rank's sequences in the run's step with the largest microbatch."""
        loader, config = self.loader(DataShard(), with_data=False), self.config
        per_rank = config.data.num_sequences // config.parallel.dp
        if isinstance(loader.packing, WindowPacking):
            return [config.data.sequence_length] * per_rank
        num_batches = max(1, min(config.train.steps * config.parallel.dp, _MOST_COUNTED // per_rank))
        each = [sum(item) for item in loader.packing.lengths(loader.items(0, num_batches * per_rank))]
        lengths = np.array(each).reshape(num_batches, per_rank)
        # The largest item is not cut; the others are divided evenly.
        largest = np.maximum(lengths.max(axis=1), lengths.sum(axis=1) / config.train.num_microbatches)
        return lengths[int(largest.argmax())].tolist()

    @property
    def loss(self) -> tuple[LossFn, LossWeightFn]:
        """The loss of a microbatch, and its weight."""
        return (comparison_loss, num_pairs) if self.rewards else (token_cross_entropy, num_loss_tokens)

    @property
    def _batch_items(self) -> int:
        return self.config.data.num_sequences // self.config.parallel.dp

    def _pack(self, store: TokenStore) -> WindowPacking | DocumentPacking | PairPacking:
        data = self.config.data
        if store.learned is None:
            return pack(store, data.packing, data.sequence_length, data.cross_documents)
        # An example that is cut would lose its question, or its answer.
        if data.cross_documents:
            raise ConfigError(
                "data.cross_documents = true, but examples and pairs are never packed across documents; leave it out"
            )
        packing = PairPacking(store) if self.rewards else DocumentPacking(store, self.config.model.max_length)
        budget = self.config.train.max_microbatch_tokens
        if budget is not None and packing.longest_item > budget:
            raise ConfigError(
                f"train.max_microbatch_tokens = {budget}, but an example of {store.name} has {packing.longest_item} "
                "tokens, and none is cut; give at least that"
            )
        return packing
