"""Models and pictures to try Carpool with.

NanoDet and the pictures come with the package, so that the first answer needs no download. Four more models
are made from packages that the `demo` extra brings: docs/demo.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from carpool.errors import CarpoolError

_HERE = Path(__file__).parent


def bundled_models() -> Path:
    """A repository like any other; see the README in each model's folder for where it comes from."""
    return _HERE / "models"


def pictures() -> list[Path]:
    """Photos to ask about; the README beside them says whose they are."""
    return sorted((_HERE / "pictures").glob("*.jpg"))


def demo_models(
    cache_dir: Path | None = None, tell: Callable[[str], None] = lambda _line: None
) -> list[Path]:
    """The paths to serve: what comes with the package and, where they can be had, the four others.

    Those are built into `cache_dir` the first time; without one they are left out. `tell` hears what is being
    done, and a sentence for each model that is left out: a demo serves what there is.
    """
    from carpool.demo.cache import prepare
    from carpool.demo.recipes import RECIPES
    from carpool.demo.sources import EXTRA, MISSING_EXTRA

    paths = [bundled_models()]
    if cache_dir is None:
        return paths
    without_extra = []
    for recipe in RECIPES:
        try:
            paths.append(prepare(recipe, cache_dir / "demo", tell))
        except CarpoolError as error:
            if error.reason == MISSING_EXTRA:
                without_extra.append(recipe.name)
            else:
                tell(f"{recipe.name} is not served: {error.message}")
        except OSError as error:
            tell(f"{recipe.name} is not served: {error}")
    if without_extra:
        tell(f"Not served without the demo extra: {', '.join(without_extra)}. To have them: {EXTRA}")
    return paths
