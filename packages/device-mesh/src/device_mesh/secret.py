"""The token that all processes of a job know and no stranger on the network does, and proofs of knowing it.

The scheduler of a job that msrun started listens on a port that others can reach. It sends each client a challenge,
and takes in only who answers with a proof made of challenge and token (HMAC-SHA-256). So the token itself is never
sent, and a recorded proof is worth nothing on another connection.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from device_mesh.launch import LaunchError

VARIABLE = "DEVICE_MESH_TOKEN"
FILE_VARIABLE = "DEVICE_MESH_TOKEN_FILE"

_LEAST_CHARACTERS = 16
_HOW = f"set {VARIABLE} to the same random text on all nodes, or {FILE_VARIABLE} to a file of your own that holds it"


def read_token(environment: Mapping[str, str] = os.environ) -> bytes:
    """The token of the jobs of this user.

    It is in DEVICE_MESH_TOKEN, or in the file that DEVICE_MESH_TOKEN_FILE names, or in
    `~/.local/state/device-mesh/token`, which is made with a random one when it is first needed. Processes of one user
    on one machine, or with one home folder, so have the same without doing anything.

    Raises LaunchError for a token that is too short or no text, and for a file that is missing or that others can read.
    """
    if VARIABLE in environment:
        return _checked(environment[VARIABLE], VARIABLE)
    path = _named(environment[FILE_VARIABLE]) if environment.get(FILE_VARIABLE) else _own_file(environment)
    try:
        found = path.stat()
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the file {path} for the job's token cannot be read ({error}): {_HOW}") from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise LaunchError(
            f"the file {path} with the job's token is open to others (mode {stat.S_IMODE(found.st_mode):04o}, owner "
            f"{found.st_uid}): chmod 600 {path}, and own it"
        )
    return _checked(text, str(path))


def proof(token: bytes, *said: str) -> str:
    """What only somebody who knows the token can say after `said`."""
    return hmac.new(token, "\0".join(said).encode(), "sha256").hexdigest()


def proves(given: str, token: bytes, *said: str) -> bool:
    """Whether that is `proof(token, *said)`, in a time that tells nothing of it."""
    return hmac.compare_digest(given.encode(), proof(token, *said).encode())


def _checked(text: str, where: str) -> bytes:
    token = text.strip()
    if len(token) < _LEAST_CHARACTERS:
        raise LaunchError(
            f"the job's token in {where} has {len(token)} characters, and {_LEAST_CHARACTERS} are the least: "
            "openssl rand -hex 32 makes a good one"
        )
    try:
        return token.encode()
    except UnicodeEncodeError as error:
        raise LaunchError(
            f"the job's token in {where} is no text in UTF-8: openssl rand -hex 32 makes a good one"
        ) from error


def _named(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise LaunchError(f"{FILE_VARIABLE} names the file {text}, and ~ leads nowhere ({error}): {_HOW}") from error


def _own_file(environment: Mapping[str, str]) -> Path:
    """The file of this user, made if it is not there; in the folder for temporary files where there is no home."""
    with suppress(OSError, RuntimeError):
        state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return _made(Path(state, "device-mesh", "token"))
    folder = Path(tempfile.gettempdir(), f"device-mesh-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(f"{folder} is not a folder of this user alone, to keep the job's token in: {_HOW}")
        return _made(folder / "token")
    except OSError as error:
        raise LaunchError(f"the job's token can be kept neither at home nor in {folder} ({error}): {_HOW}") from error


def _made(path: Path) -> Path:
    """The path of a file that holds a token as soon as it is there, whoever of several processes makes it."""
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(f"{secrets.token_hex(32)}\n")
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path
