"""How a model was trained to see pixels, from whatever says it, and what nothing says.

Settings count most, then a preset, then layers of the file that make values of pixels, then what its metadata
claims. What is left is assumed: the model is served, and every answer names what was assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig, values_on_device
from carpool.config.presets import (
    PRESETS,
    VALUES,
    keeps_crop,
    like_imagenet,
    preset_fields,
    replaced,
    said_of_pixels,
    same_values,
)
from carpool.errors import ConfigError
from carpool.types import Datatype
from carpool.vision.output_facts import FIELD_OF, Claims
from carpool.vision.picture_input import FLOATS, Picture
from carpool.vision.vision_settings import guesses

_AS_THEY_ARE = {"scale": 1.0, "mean": (0.0,), "std": (1.0,)}


class Pixels(NamedTuple):
    """`assumed` names the settings that nothing says; None of them is a guess where it is empty."""

    image: ImageSettings
    assumed: tuple[str, ...] = ()


def see_pixels(config: ModelConfig, picture: Picture, claims: Claims, task: str | None = None) -> Pixels:
    """`task` decides how a preset fits pictures into the input; its values are the same for all."""
    known = _known(config, claims, picture.spec.datatype, task)
    image = replace(ImageSettings(**known), layout=picture.layout)
    declared = config.image or ImageSettings()
    size = declared.size
    if size is None and claims.size and DYNAMIC in (picture.height, picture.width):
        sides = zip((picture.height, picture.width), claims.size, strict=True)
        height, width = (claimed if side == DYNAMIC else side for side, claimed in sides)
        size = height, width
    image = replace(image, size=size, decode=declared.decode)
    if not guesses(config):
        return Pixels(image)
    return Pixels(image, tuple(dict.fromkeys(_assumed(config, picture, claims, known, task))))


def _assumed(
    config: ModelConfig, picture: Picture, claims: Claims, known: Mapping[str, Any], task: str | None
) -> Iterator[str]:
    """Yields the settings that nothing says, or of which two things say different ones."""
    said, preset = said_of_pixels(config), config.preset
    says_values = any(name in said for name in VALUES)
    doubts = claims.doubts if preset is None else ()
    kept = preset is None or keeps_crop(preset, task)
    if "resize" not in known or ("resize" not in said and ("resize" in doubts or not kept)):
        yield "resize"
    two = not says_values and _sees_values(config, picture) and _two_values(config, claims, doubts)
    if two or not any(name in known for name in VALUES):
        yield from ("mean", "std")
    elif "scale" not in known and not _tells_unit(known):
        yield "scale"
    if picture.channels != 1 and "channels" not in known and not like_imagenet(known.get("mean", ())):
        yield "channels"
    if not (says_values and "resize" in said):
        yield from (name for name in doubts if name not in _SETTLED_ABOVE and name not in said)


_SETTLED_ABOVE = ("resize", "mean", "std")


def _sees_values(config: ModelConfig, picture: Picture) -> bool:
    """Returns whether pixels are given other values than their bytes before the model has them."""
    return picture.spec.datatype in FLOATS or values_on_device(config)


def _two_values(config: ModelConfig, claims: Claims, doubts: Sequence[str]) -> bool:
    return "mean" in doubts or twice_normalised(config, claims) is not None


def _tells_unit(known: Mapping[str, Any]) -> bool:
    """Returns whether a mean or a deviation is that of pixels from 0 to 1, or of pixels from 0 to 255."""
    return any(known.get("mean", ())) or any(one != 1.0 for one in known.get("std", ()))


def known_pixels(config: ModelConfig, claims: Claims) -> ImageSettings:
    """Returns them as far as that is known before the model's input is."""
    image = config.image or ImageSettings()
    known = _known(config, claims, Datatype.FP32, config.task)
    return ImageSettings(**known, size=image.size or claims.size, layout=image.layout, decode=image.decode)


def _known(config: ModelConfig, claims: Claims, datatype: Datatype, task: str | None) -> dict[str, Any]:
    said = said_of_pixels(config)
    found = dict(claims.image)
    says_values = any(name in said for name in VALUES)
    if config.preset is not None:
        found = preset_fields(config.preset, task)
        if "resize" in said:
            found = replaced(found, {"resize": said["resize"]})
        if claims.layers is not None and not says_values:
            found |= claims.layers
        found |= said
    else:
        found = replaced(found, said)
    takes_bytes = datatype not in FLOATS and not values_on_device(config)
    if takes_bytes and not says_values:
        found |= _AS_THEY_ARE
    return found


def with_layers(config: ModelConfig, claims: Claims) -> ModelConfig:
    """Returns the settings without the values of their preset, where layers of the file take other ones: a
    device that makes the values of pixels itself reads them there."""
    if config.image is None or twice_normalised(config, claims) is None:
        return config
    return replace(config, image=replace(config.image, **(claims.layers or {})))


def twice_normalised(config: ModelConfig, claims: Claims) -> str | None:
    """Returns a warning where the preset's values are not those that the file's own first layers take: those
    of the layers count, since pixels would be normalised twice, and nothing settles that but the values in
    [image]."""
    if config.preset is None or claims.layers is None or any(key in said_of_pixels(config) for key in VALUES):
        return None
    if same_values(claims.layers, preset_fields(config.preset)):
        return None
    takes = ImageSettings(**claims.layers)
    mean, std = list(takes.mean), list(takes.std)
    return (
        f'{claims.lines[-1]}, so that of preset = "{config.preset}" only size, crop and kernel count: '
        "with its values, too, pixels would be normalised twice, which gives wrong answers. If that is "
        f"right, set scale = {takes.scale:g}, mean = {mean} and std = {std} in [image]; "
        "to normalise before the layers, set the preset's values there"
    )


def refuse_assumed(config: ModelConfig, assumed: tuple[str, ...]) -> None:
    if assumed:
        raise ConfigError(f"{config.name}: {what_is_assumed('it', assumed, config.preset)}", field="preset")


_GUESSED: Mapping[str, tuple[str, str]] = {
    "resize": (
        "images come into its input as its resize says, a letterbox where nothing does",
        'set resize = "letterbox", "stretch" or "crop" in [image]',
    ),
    "mean": (
        "pixels have the values that carpool inspect shows, from 0 to 1 where nothing is known",
        "set scale, mean and std in [image]",
    ),
    "scale": ("pixels run from 0 to 1", "set scale in [image], which is 1.0 for pixels from 0 to 255"),
    "channels": ("its channels are red, green, blue", 'set channels = "rgb" or "bgr" in [image]'),
    "kernel": ("images are resized with the usual kernel", "set kernel in [image]"),
    "outputs": (
        "its outputs are those of the task that was set, which nothing but their shapes shows",
        "compare its answers with those of its own code and set format in the task's table, or remove the "
        "task: it is then served with tensors",
    ),
    "labels": (
        "the first label is of class 0",
        "begin the labels with a line for class 0 if the model counts from 1, and set format in [detect]",
    ),
    "activation": ("its scores are made by that activation", "set activation in the task's table"),
    "normalized": ("its boxes are in pixels of the input", "set normalized = true or false in [detect]"),
}
"""What is assumed, by setting, and what to do about it."""


def what_is_assumed(name: str, assumed: tuple[str, ...], preset: str | None = None) -> str:
    """Returns what to do about it, for the log, the banner and the error of --strict-models.

    A preset is advised only where nothing is known of the pixels: it would replace what is.
    """
    fields = [key.removeprefix(FIELD_OF) for key in assumed if key.startswith(FIELD_OF)]
    told = [(key, *_GUESSED[key]) for key in assumed if key in _GUESSED]
    guessed = [words for _, words, _ in told]
    advice = [what for _, _, what in told]
    if fields:
        guessed.append(f"{', '.join(fields)} in preprocessor_config.json changes no pixel")
        advice.append("set preset, or resize, scale, mean and std in [image]")
    if {"resize", "mean"} <= {*assumed} and preset is None:
        advice = [what for key, _, what in told if key not in ("resize", "mean", "channels")]
        advice = [_ADVISED, *advice]
    what = "was trained to see pixels"
    if not {"mean", "scale", "channels", "kernel"}.intersection(assumed) and not fields:
        what = "takes images of other proportions" if "resize" in assumed else "means its outputs"
    wrong = "and the wrong way gives wrong answers"
    todo = "; ".join(advice)
    todo = todo[:1].upper() + todo[1:]
    return f"nothing says how {name} {what}, {wrong}. Assumed: {'; '.join(guessed)}. {todo}"


_ADVISED = (
    'write preset = "…" into its model.toml (or the parameter carpool_preset into config.pbtxt), or '
    f"give --preset to carpool serve: {', '.join(PRESETS)}; or set resize, mean and std in [image]. "
    "carpool inspect MODEL --picture PHOTO shows what each would answer"
)
