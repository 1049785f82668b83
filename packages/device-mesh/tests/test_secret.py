"""The token of a job: where it comes from, and what is refused."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from device_mesh import LaunchError, secret
from device_mesh.msrun_scheduler import schedule
from device_mesh.secret import proof, proves, read_token

TOKEN = "0123456789abcdef-of-this-job"


def test_a_token_is_made_once_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    token = read_token(environment)
    assert len(token) == 64
    assert read_token(environment) == token
    path = tmp_path / "state" / "device-mesh" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert read_token({"XDG_STATE_HOME": str(tmp_path / "other")}) != token


def test_processes_that_start_at_once_have_the_same(tmp_path: Path) -> None:
    program = "from device_mesh.secret import read_token; print(read_token().decode())"
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    starts = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert len({start.communicate(timeout=60)[0] for start in starts}) == 1


def test_where_there_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    environment = {"XDG_STATE_HOME": str(tmp_path / "file" / "nothing")}
    assert read_token(environment) == read_token(environment)
    folder = tmp_path / f"device-mesh-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="is not a folder of this user alone, to keep the job's token in: set DEVICE"):
        read_token(environment)


def test_a_file_at_home_that_belongs_to_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that mounts a home folder of another user: the folder for temporary files serves."""
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    at_home = read_token(environment)
    path = tmp_path / "device-mesh" / "token"
    before = path.read_bytes()
    stat_of = Path.stat

    def of_another(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        kept = stat_of(self, follow_symlinks=follow_symlinks)
        owner = os.getuid() + 1000 if self == path else kept.st_uid
        return os.stat_result([*kept[:4], owner, *kept[5:]])

    monkeypatch.setattr(Path, "stat", of_another)
    token = read_token(environment)
    assert token != at_home
    assert token == read_token(environment)
    assert path.read_bytes() == before
    with pytest.raises(LaunchError) as error:
        read_token({"DEVICE_MESH_TOKEN_FILE": str(path)})
    for words in (f"belongs to user {os.getuid() + 1000}", "set DEVICE_MESH_TOKEN to the same random text"):
        assert words in str(error.value)
    assert "open to others" not in str(error.value)


def test_a_home_without_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that shows all files as open to all, such as CIFS: nothing is left there."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(temporary))
    found = os.fstat

    def without_modes(descriptor: int) -> os.stat_result:
        kept = found(descriptor)
        at_home = os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(home))
        return os.stat_result([kept.st_mode | 0o755 if at_home else kept.st_mode, *kept[1:]])

    monkeypatch.setattr(secret.os, "fstat", without_modes)
    environment = {"XDG_STATE_HOME": str(home)}
    assert read_token(environment) == read_token(environment)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert (temporary / f"device-mesh-{os.getuid()}" / "token").is_file()


def test_variable_and_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN} of the file\n", encoding="utf-8")
    path.chmod(0o600)
    assert read_token({"DEVICE_MESH_TOKEN_FILE": str(path)}) == f"{TOKEN} of the file".encode()
    assert read_token({"DEVICE_MESH_TOKEN": TOKEN, "DEVICE_MESH_TOKEN_FILE": str(path)}) == TOKEN.encode()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.chmod(0o644), r"is open to others \(mode 0644\): chmod 600 it. Or set DEVICE_MESH_TOKEN to"),
        (lambda path: path.unlink(), "cannot be read .*No such file.* set DEVICE_MESH_TOKEN to the same random text"),
        (lambda path: path.write_text("short\n"), "has 5 characters, and 16 are the least: openssl rand"),
        (lambda path: path.write_bytes(b"\xff" * 40), "cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN, encoding="utf-8")
    path.chmod(0o600)
    spoil(path)
    with pytest.raises(LaunchError, match=said):
        read_token({"DEVICE_MESH_TOKEN_FILE": str(path)})


def test_a_variable_that_is_too_short() -> None:
    with pytest.raises(LaunchError, match="in DEVICE_MESH_TOKEN has 0 characters"):
        read_token({"DEVICE_MESH_TOKEN": ""})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DEVICE_MESH_TOKEN_FILE", "~nobodyxx/t", "names the file ~nobodyxx/t, and ~ leads nowhere"),
        ("DEVICE_MESH_TOKEN_FILE", "~nobody\udcff/t", "names the file ~nobody\\udcff/t, and ~ leads nowhere"),
        ("DEVICE_MESH_TOKEN_FILE", "/no/\udcff", "the file /no/\\udcff for the job's token cannot be read"),
        ("DEVICE_MESH_TOKEN", "\udcff" * 20, "token in DEVICE_MESH_TOKEN is no text in UTF-8: openssl rand"),
    ],
)
def test_variables_that_lead_nowhere_are_errors_in_words(
    variable: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In workers, and in the scheduler, which prints them."""
    with pytest.raises(LaunchError, match=re.escape(said)):
        read_token({variable: value})
    scheduler = {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "1"}
    assert schedule(scheduler | {variable: value}) == 2
    assert said in capsys.readouterr().out


def test_proofs() -> None:
    """HMAC-SHA-256; the digest is that of `printf 'client\\0abc' | openssl dgst -sha256 -hmac key`."""
    assert proof(b"key", "client", "abc") == DIGEST
    assert proves(DIGEST, b"key", "client", "abc")
    assert not proves(DIGEST, b"key", "client", "abd")
    assert not proves(DIGEST, b"kez", "client", "abc")
    assert not proves("", b"key", "client", "abc")
    assert not proves("é", b"key", "client", "abc")


DIGEST = "5d3e893261365319665d94f3003700bc531744d2b3059c48e00a88dece2334b4"
