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
from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError
from penstock.engine.learning_rate import LearningRate, Ramp, WeightDecay
from penstock.engine.model_settings import model_config
from penstock.engine.optimizer import OptimizerConfig
from penstock.engine.options import EngineOptions, Precision
from penstock.model import ContextForm, ModelGroups, decoder_units
from penstock.parallel import Layout
from penstock.runtime import Pairs


def layout(config: RunConfig) -> Layout:
    ours = config.parallel
    return Layout(pp=ours.pp, dp=ours.dp, cp=ours.cp, tp=ours.tp, ep=ours.ep, order=ours.axes)


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """AdamW with its schedules of learning rate and weight decay."""
    ours, end = config.optimizer, config.num_decay_steps
    last = ours.final_weight_decay
    return OptimizerConfig(
        learning_rate=LearningRate(
            peak=ours.learning_rate,
            decay=ours.decay,  # pyright: ignore[reportArgumentType]  # taken by name
            num_warmup_steps=ours.num_warmup_steps,
            num_decay_steps=end,
            floor=ours.final_learning_rate,
        ),
        weight_decay=WeightDecay(
            first=ours.weight_decay,
            last=last,
            ramp=Ramp.CONSTANT if last is None else Ramp.COSINE,
            num_steps=None if last is None else end,
        ),
        betas=(ours.beta1, ours.beta2),
        eps=ours.eps,
        clip_norm=ours.clip_norm or None,
        zero=ours.zero,
    )


def engine_options(config: RunConfig) -> EngineOptions:
    """How the engine runs the model."""
    return EngineOptions(
        schedule=config.schedule.choice,
        cut=config.schedule.cut,
        measure_lengths=_typical_lengths(config) if config.schedule.measure else None,
        seed=config.train.seed,
        precision=Precision(config.train.precision),
        recompute=config.train.recompute,
        optimizer=optimizer_config(config),
        attention=ContextForm(config.parallel.attention),
        device=config.parallel.device,
        pairs=Pairs(config.schedule.overlap, early_release=config.schedule.early_release),
        timeout_s=config.parallel.timeout_s,
    )


def _typical_lengths(config: RunConfig) -> tuple[int, ...]:
    """The lengths of a full microbatch's sequences."""
    num_sequences = -(-config.data.num_sequences // config.parallel.dp // config.train.num_microbatches)
    return (config.data.sequence_length,) * num_sequences


def check_parts(config: RunConfig) -> "RunData":
    """The run's data, once every part of the run has been described and found possible; nothing is started.

    Raises:
        ValueError: the corpus, the model, its cut or the optimizer can not be as the settings say.
    """
    options = engine_options(config)
    data = RunData.load(config)
    ours = config.parallel
    groups = ModelGroups.planned(tp=ours.tp, cp=ours.cp, ep=ours.ep, form=options.attention)
    units = decoder_units(model_config(config, data.corpus.vocab_size), groups=groups)
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
