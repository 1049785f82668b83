"""The command `device-mesh show`: which rank sits where, for a configuration file and a world size."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from parallel_config import ConfigError, ConfigWarning, load, path_argument, plan, show_anywhere

from device_mesh.describe import as_dict, as_text
from device_mesh.mesh import ParallelMesh
from device_mesh.picture import as_svg


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 when the file or the arguments are wrong."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where the output goes to a closed pipe
    show_anywhere()
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            degrees = plan(load(arguments.file), arguments.world_size)
        mesh = ParallelMesh(degrees, ranks_per_node=arguments.ranks_per_node)
        text = json.dumps(as_dict(mesh, rank=arguments.rank)) if arguments.json else as_text(mesh, rank=arguments.rank)
        if arguments.svg is not None:
            _write(arguments.svg, as_svg(mesh, rank=arguments.rank or 0))
    except ConfigError as error:
        return _refuse(error, as_json=arguments.json)
    except (ValueError, OSError) as error:
        print(f"device-mesh: {error}", file=sys.stderr)
        return 2
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="device-mesh", description="Which rank sits where under a parallel plan.")
    show = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "show", help="print the axes of a mesh and their groups of ranks"
    )
    show.add_argument("file", type=path_argument, metavar="FILE", help="the run's YAML file")
    show.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    show.add_argument("--rank", type=int, metavar="R", help="only this rank's coordinates and groups")
    show.add_argument("--ranks-per-node", type=int, metavar="K", help="also say which groups stay within a node")
    show.add_argument("--json", action="store_true", help="print JSON instead of tables")
    show.add_argument("--svg", type=path_argument, metavar="OUT.svg", help="also draw the mesh into this file")
    return parser


def _refuse(error: ConfigError, *, as_json: bool) -> int:
    if as_json:
        problems = [
            {name: getattr(problem, name) for name in ("path", "value", "rule", "suggestion", "file", "line", "column")}
            for problem in error.problems
        ]
        print(json.dumps({"problems": problems}, default=str))
    else:
        print(*error.problems, sep="\n", file=sys.stderr)
    return 2


def _write(path: Path, text: str) -> None:
    """Write the whole file or, on an error, none of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
