"""A run's settings completed and checked before anything starts; PyTorch is loaded only for a pretrained model."""

from collections.abc import Callable

from penstock.engine.folders.runs import continued_run
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import SETTINGS, ConfigError, Precision, RunConfig, check_rates, check_sections, walk_settings
from penstock.settings.declare import plain, with_values

_PRETRAINED, _TOKENIZER, _SEQUENCE_LENGTH = "model.pretrained", "data.tokenizer", "data.sequence_length"
_NATIVE, _PRECISION = "model.native", "train.precision"
# Settings of the model that the folder it comes from does not decide; coefficients of losses are others.
_FREE = (_PRETRAINED, _NATIVE, "model.max_length", "model.num_predictions", "experts.bias_step")


def check_run(
    config: RunConfig, proves: bool = True, refuse_sizes: Callable[[RunConfig], object] = lambda config: None
) -> RunConfig:
    """Check that all settings can go together, prove the schedule, and return `config`.

    proves: False leaves the proof to a caller that needs the program too. refuse_sizes: called before the proof, which
    takes long for many ranks; it may raise.

    Raises: ConfigError naming the settings that exclude each other, and what would be possible.
    """
    check_sections(config)
    kept, recomputes = config.train.num_kept_microbatches, config.train.recompute != "none"
    choice, ranks = ScheduleChoice(config.schedule, num_kept=kept, recomputes=recomputes), config.parallel.pp
    choice.check_settings()
    # Sizes first: to build and prove a schedule that has no place to run takes long.
    units = config.model.num_units
    stages = ranks if ranks > units else choice.placement(ranks).stages_per_route
    if stages > units and config.schedule.cut is None:
        raise ConfigError(
            f"parallel.pp = {ranks} with schedule.name = {choice.name!r} asks for at least "
            f"{stages} stages, but a model of {config.model.num_layers} layers has {units} units to cut from "
            f"(embedding, 2 a layer, head), so at most {units} are possible"
        )
    choice.cut(units, stages, config.model.units_per_layer)
    if proves:
        refuse_sizes(config)
        shares = config.parallel.shares_layers
        choice.checked_program(ranks, config.train.num_microbatches, whole_backwards=shares)
    check_rates(config)
    return config


def with_pretrained(config: RunConfig) -> RunConfig:
    """The settings, completed by shape, tokenizer and precision of `model.pretrained`; without one, by bytes and fp32.

    A run that goes on takes them from its own folder, since the model that it began with may be gone. The settings
    that train experts, and the longest sequence, stay as they are.

    Raises: ConfigError if the decoder cannot be the folder's model, or a setting contradicts it.
    """
    folder = config.model.pretrained
    if folder is None:
        values = {_TOKENIZER: config.data.tokenizer or "bytes", _PRECISION: config.train.precision or Precision.FP32}
        return with_values(config, {SETTINGS[name].path: value for name, value in values.items()})
    run = continued_run(config)
    if run is not None:
        shape, tokenizer, precision = run.model, config.data.tokenizer or run.data.tokenizer, run.train.precision
    else:
        # Imported here, since it loads PyTorch.
        from penstock.engine.folders.model_folder import open_folder

        try:
            model = open_folder(folder, config.model.native)
            model.refuse_adapters()
            model.check_learnable()
            shape, _ = model.shape, model.files
            model.refuse_classifier(but_reward_models=True)
            if model.is_reward_model and config.adapter.is_used:
                raise ValueError("a reward model is trained whole; leave the settings of adapter out")
            tokenizer, precision = config.data.tokenizer or model.tokenizer_name, model.stored_precision
        except ValueError as error:
            raise ConfigError(f"{_PRETRAINED} = {folder!r}: {error}") from None
    settings, defaults = config.flat(), RunConfig().flat()
    values = {
        setting.name: plain(setting.default)
        for setting in walk_settings(shape)
        if setting.name not in _FREE and not setting.name.endswith("_loss")
    }
    for name, value in values.items():
        if settings[name] not in (defaults[name], value):
            raise ConfigError(
                f"{name} = {settings[name]!r}, but {_PRETRAINED} = {folder!r} has {value!r}; leave the setting out"
            )
    values[_TOKENIZER] = tokenizer
    values[_PRECISION] = config.train.precision or precision
    if shape.native is False:
        values[_NATIVE] = False
    if settings["model.max_length"] == defaults["model.max_length"]:
        values["model.max_length"] = shape.max_length
        if settings[_SEQUENCE_LENGTH] == defaults[_SEQUENCE_LENGTH]:
            values[_SEQUENCE_LENGTH] = min(defaults[_SEQUENCE_LENGTH], shape.max_length)
    return with_values(config, {SETTINGS[name].path: value for name, value in values.items()})
