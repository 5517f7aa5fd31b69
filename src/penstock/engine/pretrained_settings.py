"""The settings of a run that begins with a model which is already there: its shape is that model's."""

from dataclasses import fields, replace
from typing import Any

from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError


def _is_free(name: str) -> bool:
    """Whether a setting of the model does not belong to what is already there."""
    free = ("model.pretrained", "model.max_length", "model.num_predictions", "experts.bias_step")
    return name in free or name.endswith("_loss")


def with_pretrained(config: RunConfig) -> RunConfig:
    """The settings with the shape of `model.pretrained` filled in; without one, as they are.

    What trains experts, and the longest sequence, stay as they are given.

    Raises:
        ConfigError: the folder holds no model that the decoder is, or a setting contradicts it.
    """
    folder = config.model.pretrained
    if folder is None:
        return config
    # Only now, since they load PyTorch.
    from penstock.engine.model_settings import settings_of
    from penstock.engine.pretrained import pretrained_shape

    try:
        shape = pretrained_shape(folder)
    except ValueError as error:
        raise ConfigError(f"model.pretrained = {folder!r}: {error}") from None
    given, usual = config.flat(), RunConfig().flat()
    found = {name: value for name, value in settings_of(shape).items() if not _is_free(name)}
    for name in given:
        if name.partition(".")[0] not in ("model", "rope", "experts") or _is_free(name):
            continue
        wanted = found.get(name, usual[name])
        if given[name] not in (usual[name], wanted):
            raise ConfigError(
                f"{name} = {given[name]!r}, but model.pretrained = {folder!r} has {wanted!r}; leave the setting out"
            )
    if given["model.max_length"] == usual["model.max_length"]:
        found["model.max_length"] = shape.max_length
    return _replaced(config, found)


def _replaced(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    sections = {}
    for field in fields(config):
        own = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(f"{field.name}.")}
        if own:
            sections[field.name] = replace(getattr(config, field.name), **own)
    return replace(config, **sections)
