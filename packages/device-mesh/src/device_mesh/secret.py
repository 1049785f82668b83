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
    on one machine, or with one home folder, so have the same without doing anything. Where the file at home belongs to
    another user, or could be read by others as soon as it is made, a file in the folder for temporary files serves.

    Raises LaunchError for a token that is too short or no text, and for a file that is missing or that others can read.
    """
    if VARIABLE in environment:
        return _checked(environment[VARIABLE], VARIABLE)
    path = _named(environment[FILE_VARIABLE]) if environment.get(FILE_VARIABLE) else _own_file(environment)
    shown = _shown(str(path))
    try:
        problem = _problem(path.stat())
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the file {shown} for the job's token cannot be read ({error}): {_HOW}") from error
    if problem:
        raise LaunchError(f"the file {shown} with the job's token {problem}. Or {_HOW}")
    return _checked(text, shown)


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
        raise LaunchError(f"{FILE_VARIABLE} names the file {_shown(text)}, and ~ leads nowhere: {_HOW}") from error


def _shown(text: str) -> str:
    """A path as any terminal can show it."""
    return text.encode(errors="backslashreplace").decode()


def _problem(found: os.stat_result) -> str:
    """Why a file is no place for the token of this user, and what would help; empty for one that is."""
    mode = stat.S_IMODE(found.st_mode)
    if _is_of_others(found):
        return f"belongs to user {found.st_uid}, and this process is of user {os.getuid()}: chown {os.getuid()} it"
    return f"is open to others (mode {mode:04o}): chmod 600 it" if mode & 0o077 else ""


def _is_of_others(found: os.stat_result) -> bool:
    return found.st_uid not in (os.getuid(), 0)


def _own_file(environment: Mapping[str, str]) -> Path:
    """The file of this user, made if it is not there; in the folder for temporary files where home cannot keep it."""
    with suppress(OSError, RuntimeError):
        state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = _made(Path(state, "device-mesh", "token"))
        if not (path.exists() and _is_of_others(path.stat())):
            return path
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
    """The path of a file that holds a token as soon as it is there, whoever of several processes makes it.

    Raises OSError where it cannot be made, or where the file system does not keep it to this user.
    """
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            if problem := _problem(os.fstat(descriptor)):
                raise PermissionError(f"a new file in {path.parent} {problem}")
            file.write(f"{secrets.token_hex(32)}\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path
