"""From a run's settings to the parts of a run: each room's own frozen description."""

from dataclasses import dataclass
from pathlib import Path

from penstock.data import (
    BatchSize,
    Corpus,
    CorpusSpec,
    DataShard,
    Loader,
    MicroBatchSpec,
    PackedBatch,
    load_corpus,
    pack,
    validation_batches,
)
from penstock.engine.build import cut_units
from penstock.engine.options import EngineOptions
from penstock.model import ModelGroups, decoder_units
from penstock.settings import ConfigError, RunConfig


def check_parts(config: RunConfig) -> "RunData":
    """The run's data, once every part of the run has been described and found possible; nothing is started.

    Raises:
        ValueError: the corpus, the model, its cut or the optimizer can not be as the settings say.
    """
    options = EngineOptions.of(config)
    data = RunData.load(config)
    ours = config.parallel
    groups = ModelGroups.planned(tp=ours.tp, cp=ours.cp, ep=ours.ep, form=options.attention)
    units = decoder_units(config.model.whole(data.corpus.vocab_size), groups=groups)
    cut_units(units, options.choice.placement(config.parallel.pp), options)
    return data


def micro_batches(config: RunConfig) -> MicroBatchSpec:
    return MicroBatchSpec(num=config.train.num_microbatches, max_tokens=config.train.max_microbatch_tokens)


@dataclass(frozen=True)
class RunData:
    """A run's corpus, packed: training without end, and the fixed batches of validation."""

    config: RunConfig
    corpus: Corpus

    @classmethod
    def load(cls, config: RunConfig) -> "RunData":
        """Read the corpus, from the cache where it has been tokenised before.

        Raises:
            ValueError: it is missing, empty, too short for an item, or holds a token outside the model's vocabulary.
        """
        data = config.data
        spec = CorpusSpec(
            source=data.corpus,
            validation_source=data.validation_corpus,
            validation_fraction=data.validation_fraction,
            text_field=data.text_field,
            tokenizer=data.tokenizer,
            end_token=data.end_token or False,
        )
        cache = None if data.cache is None else Path(data.cache).expanduser()
        try:
            corpus = load_corpus(spec, cache)
        except PermissionError as error:
            raise ConfigError(
                f"data.cache = {data.cache!r} can not be written ({error.strerror}); name another folder, or None"
            ) from None
        corpus.check_vocabulary(config.model.vocab_size or corpus.vocab_size)
        found = cls(config, corpus)
        # Both sides are packed once here, so that too little text is told before anything starts.
        found.loader(DataShard(), with_data=False)
        found.validation(DataShard(0, config.parallel.dp), with_data=False)
        return found

    def loader(self, shard: DataShard, with_data: bool = True) -> Loader:
        """This data-parallel rank's training batches, one a step."""
        return Loader(
            self._pack(self.corpus.training), self._size, seed=self.config.train.seed, shard=shard, with_data=with_data
        )

    def validation(self, shard: DataShard, with_data: bool = True) -> tuple[PackedBatch, ...]:
        """This data-parallel rank's validation batches; none where no text is held back."""
        if self.corpus.validation is None:
            return ()
        return validation_batches(
            self._pack(self.corpus.validation),
            self._size,
            max_items=self.config.validation.num_sequences,
            shard=shard,
            with_data=with_data,
        )

    @property
    def _size(self) -> BatchSize:
        return BatchSize(items=self.config.data.num_sequences // self.config.parallel.dp)

    def _pack(self, store):
        data = self.config.data
        return pack(store, data.packing, data.sequence_length, data.cross_documents)
