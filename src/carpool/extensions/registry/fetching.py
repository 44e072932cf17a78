"""Brings models of registries, and of repositories of other machines, before a server reads models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.config.remote_address import remote_address
from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.extensions.registry.followed_model import Registries
from carpool.extensions.registry.remote_repository import Remotes
from carpool.extensions.registry.source import RegistryError
from carpool.observe.logs import logger


def fetched(paths: Sequence[Path], settings: ServerSettings, tell: Callable[[str], None]) -> Sequence[Path]:
    """Returns the paths, with a folder for each address.

    A registry or a repository that is down is a warning: what was fetched before serves, or a model is
    reported as absent. Raises `ConfigError` for a repository of which nothing was ever fetched.
    """
    if any(map(remote_address, paths)):
        paths = _of_repositories(paths, settings, tell)
    found, followed, complaints = Registries(settings.option("registry"), settings.cache_dir).folders(paths)
    for complaint in complaints:
        logger("registry").warning("registry", message=complaint)
    for model in followed:
        tell(f"Asking the registry for {model.settings.stable}")
        try:
            model.prepare()
        except RegistryError as error:
            serves = ", ".join(map(str, model.state.serve)) or "nothing yet"
            logger("registry").warning("registry", model=model.name, message=error.message, serves=serves)
    return found


def _of_repositories(
    paths: Sequence[Path], settings: ServerSettings, tell: Callable[[str], None]
) -> Sequence[Path]:
    remotes = Remotes.of(settings)
    complaints = remotes.refresh(lambda step: tell(f"{step[0].upper()}{step[1:]}"))
    for complaint in complaints:
        logger("remote").warning("repository-not-fetched", message=complaint)
    if complaints and not all(one.folder.exists() for one in remotes.repositories.values()):
        raise ConfigError(complaints[0], field="models")
    return remotes.folders(paths)
