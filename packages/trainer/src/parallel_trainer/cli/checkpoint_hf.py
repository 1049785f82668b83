"""`parallel-train checkpoint export-hf` and `import-hf`: to Hugging Face's folders and from them."""

from __future__ import annotations

import argparse
import json
import sys

from parallel_config import path_argument

from parallel_trainer.checkpoint.index import Checkpoint, resolve

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser], *, path: str) -> None:
    """Declare both.

    path: what a checkpoint's path may be, for `--help`.
    """
    export = actions.add_parser(
        "export-hf",
        help="write its weights as a folder that Hugging Face's transformers loads",
        description="Write a checkpoint's weights, whatever plan saved them, as config.json and safetensors files that "
        "transformers loads. Memory holds some blocks at a time.",
    )
    export.add_argument("checkpoint", type=path_argument, help=path)
    export.add_argument("folder", type=path_argument, help="the folder to write, which does not exist yet or is empty")
    export.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)")
    export.set_defaults(run=_export)
    bring = actions.add_parser(
        "import-hf",
        help="make a checkpoint of a folder that Hugging Face's transformers saved",
        description="Make a checkpoint of step 0 from config.json and safetensors files, for a run with "
        "checkpoint.load_path and checkpoint.no_load_optim: true, under any plan; and print the model section that "
        "its file needs. Memory holds a block at a time.",
    )
    bring.add_argument(
        "folder", type=path_argument, help="the folder, with config.json and model.safetensors or its index"
    )
    bring.add_argument("checkpoint", type=path_argument, help="the new checkpoint, a folder that does not exist yet")
    bring.set_defaults(run=_import)


def _export(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint.open(resolve(args.checkpoint))
    from parallel_trainer.checkpoint.hugging_face_checkpoint import export_folder  # needs MindSpore

    export_folder(checkpoint, args.folder, dtype=args.dtype)
    files = sorted(args.folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    print(f"{args.folder}: {len(checkpoint.weights)} weights in {args.dtype}, {size:,} bytes in {len(files)} files")
    return 0


def _import(args: argparse.Namespace) -> int:
    from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder  # needs MindSpore
    from parallel_trainer.checkpoint.hugging_face_checkpoint import import_folder

    with HuggingFaceFolder.open(args.folder) as folder:
        for note in folder.config.notes:
            print(f"Note: {note}", file=sys.stderr)
        checkpoint = import_folder(folder, args.checkpoint)
        size = sum(checkpoint.files.values())
        print(f"# {checkpoint.folder}: {len(checkpoint.weights)} weights, {size:,} bytes. A run starts from it with")
        print(f"checkpoint:\n  load_path: {json.dumps(str(checkpoint.folder))}\n  no_load_optim: true")
        print("  save_path: output/checkpoint")
        print(folder.config.yaml, end="")
    return 0
