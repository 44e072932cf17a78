"""How a model was trained to see pixels, from whatever says it, and what nothing says.

Settings count most, then a preset, then layers of the file that make values of pixels, then what its metadata
claims. What is left is assumed: the model is served, and every answer names what was assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from carpool.config.backend_kinds import kind_of
from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig, values_on_device
from carpool.config.presets import PRESETS, VALUES, preset_fields, replaced, said_of_pixels
from carpool.errors import ConfigError
from carpool.types import Datatype
from carpool.vision.claims import Claims
from carpool.vision.recognition import FLOATS
from carpool.vision.tasks.task import Picture

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
    if not _guesses(config):
        return Pixels(image)
    values = () if any(name in known for name in VALUES) else ("mean", "std")
    return Pixels(image, (*(() if "resize" in known else ("resize",)), *values))


def known_pixels(config: ModelConfig, claims: Claims) -> ImageSettings:
    """Returns them as far as that is known before the model's input is."""
    image = config.image or ImageSettings()
    known = _known(config, claims, Datatype.FP32, config.task)
    return ImageSettings(**known, size=image.size or claims.size, layout=image.layout, decode=image.decode)


def _known(config: ModelConfig, claims: Claims, datatype: Datatype, task: str | None) -> dict[str, Any]:
    said = said_of_pixels(config)
    found = dict(claims.image)
    if config.preset is not None:
        found = preset_fields(config.preset, task)
        if "resize" in said:
            found = replaced(found, {"resize": said["resize"]})
        found |= said
    else:
        found = replaced(found, said)
    takes_bytes = datatype not in FLOATS and not values_on_device(config)
    if takes_bytes and not any(name in said for name in VALUES):
        found |= _AS_THEY_ARE
    return found


def _guesses(config: ModelConfig) -> bool:
    """Who writes a Python model writes it for the pictures that this server sends; a fake one sees none."""
    kind = kind_of(config.backend)
    return kind.needs_file and kind.name != "python" and config.generate is None


def preset_against_layers(config: ModelConfig, claims: Claims) -> str | None:
    """Returns a warning where the preset's values are not those that the file's own first layers take: the
    preset counts, since it was chosen, but values would then be normalised twice."""
    if config.preset is None or claims.layers is None or any(key in said_of_pixels(config) for key in VALUES):
        return None
    takes, given = ImageSettings(**claims.layers), ImageSettings(**preset_fields(config.preset))
    if all(getattr(takes, key) == getattr(given, key) for key in VALUES):
        return None
    mean, std = list(takes.mean), list(takes.std)
    return (
        f'{claims.lines[-1]}, and preset = "{config.preset}" changes pixels before that, so that they may be '
        "normalised twice, which gives wrong answers. To leave it to the layers, "
        f"set scale = {takes.scale:g}, mean = {mean} and std = {std} in [image]; "
        "to keep the preset's, set its values there"
    )


def refuse_assumed(name: str, assumed: tuple[str, ...]) -> None:
    if assumed:
        raise ConfigError(f"{name}: {what_is_assumed('it', assumed)}", field="preset")


def what_is_assumed(name: str, assumed: tuple[str, ...]) -> str:
    """Returns what to do about it, for the log, the banner and the error of --strict-models.

    Where the values are known, a preset would replace them, so only how pictures are fitted is asked for.
    """
    told = {
        "resize": "images are letterboxed into its input",
        "mean": "pixels run from 0 to 1, without mean and std",
    }
    guesses = " and ".join(words for key, words in told.items() if key in assumed)
    what = "was trained to see pixels"
    advice = (
        'Write preset = "…" into its model.toml (or the parameter carpool_preset into config.pbtxt), or '
        f"give --preset to carpool serve: {', '.join(PRESETS)}; or set resize, mean and std in [image]. "
        "carpool inspect MODEL --picture PHOTO shows what each would answer"
    )
    if "mean" not in assumed:
        what = "takes images of other proportions"
        advice = 'Set resize = "letterbox", "stretch" or "crop" in [image] of its model.toml'
    wrong = "and the wrong way gives wrong answers"
    return f"nothing says how {name} {what}, {wrong}. Assumed: {guesses}. {advice}"
