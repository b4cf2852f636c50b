"""Logins of registries, in the files where docker, podman and skopeo keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.store.registry.credential_files import CredentialFile
from blobstore.store.registry.login import Login


@dataclass(frozen=True, slots=True)
class CredentialPlaces:
    """Where to read the paths of files from: variables of the environment, None if unset.

    ``home`` is the user's home folder, ``user_id`` the number of the user.
    """

    home: Path
    user_id: int
    registry_auth_file: str | None = None
    docker_config: str | None = None
    xdg_runtime_dir: str | None = None
    xdg_config_home: str | None = None

    @property
    def paths(self) -> list[Path]:
        """The files, in the order in which they are read.

        ``REGISTRY_AUTH_FILE`` is the only one if it is set, as for skopeo. Otherwise docker's file
        is first, because it is the one that logins are written to; ``DOCKER_CONFIG`` replaces its
        folder. podman's files follow (containers/image@df7e80d2 pkg/docker/config/config.go
        `getAuthFilePaths`, which has docker's file last).
        """
        if self.registry_auth_file:
            return [Path(self.registry_auth_file)]
        docker = Path(self.docker_config) if self.docker_config else self.home / ".docker"
        run = Path(self.xdg_runtime_dir or f"/run/containers/{self.user_id}")
        run = run / "containers" if self.xdg_runtime_dir else run
        config = Path(self.xdg_config_home) if self.xdg_config_home else self.home / ".config"
        return [
            docker / "config.json",
            run / "auth.json",
            config / "containers" / "auth.json",
        ]


class Credentials:
    """The logins in several files. The first file that has one for a registry decides."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """``paths``: at least one; logins are kept in the first."""
        self._files = [CredentialFile(path) for path in paths]

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login for ``repository`` at the registry ``host[:port]``, None if unknown.

        Raises: as `CredentialFile.find`.
        """
        found = (file.find(host, repository) for file in self._files)
        return next((login for login in found if login is not None), None)

    def keep(self, host: str, login: Login) -> str:
        """Keep a login; return where. Raises: as `CredentialFile.keep`."""
        return self._files[0].keep(host, login)

    def drop(self, host: str) -> bool:
        """Forget the login in the first file; return False if it is not there.

        Raises: as `CredentialFile.drop`.
        """
        return self._files[0].drop(host)
