"""What becomes of each YAML file of MindFormers' wheels: the table in docs/migration.md.

    pip download --no-deps --dest wheels mindformers==2.0.0 mindformers==2.1.0
    python tools/migration_table.py wheels/*.whl             # writes the table
    python tools/migration_table.py wheels/*.whl --compare   # exits with 1 where the page has another one

A wheel's unpacked folder can be named instead. Nothing of the wheels is copied but names and figures.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from parallel_config import Document, Problem, read, repairs
from parallel_config.formats import is_graph_mode
from parallel_config.loading import examine
from parallel_config.migrate import HuggingFace, Kind, Migration, migrate
from parallel_config.migrate.draft import is_within, leaves

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
WORLD_SIZES = [2**power for power in range(14)]
"""Ranks that a file of the dynamic-graph mode, which leaves them open, is checked for."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
    },
}
"""Figures of these models' published config.json, for files that leave their model to such a file."""

_MODEL_OF = {
    "finetune_deepseek3": "DeepSeek-V3",
    "finetune_qwen3": "Qwen3-32B",
    "dense_template": "Qwen3-32B",
    "moe_template": "Qwen3-30B-A3B",
}
"""Which of them, by a part of the file's name."""


@frozen(order=True)
class Row:
    """A file, its format, what happened, and details."""

    name: str
    kind: str
    outcome: str
    details: str


def yaml_files(source: Path) -> dict[str, str]:
    """The YAML files of a wheel, or of its unpacked folder, by their names below `configs`."""
    if source.is_dir():
        found = {
            path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in source.rglob("*.y*ml")
        }
    else:
        with zipfile.ZipFile(source) as wheel:
            found = {
                name: wheel.read(name).decode("utf-8") for name in wheel.namelist() if re.search(r"\.ya?ml$", name)
            }
    return {name.removeprefix("configs/"): text for name, text in sorted(found.items())}


def row(name: str, text: str) -> Row:
    """What becomes of a file."""
    document = read(text, name)
    if not is_graph_mode(document):
        return _dynamic(name, document)
    problems = examine(document, 8).problems
    if len(problems) != 1 or repairs(document, 8):
        raise AssertionError(f"{name}: check has to say one thing and offer no edits")
    made = migrate(document)
    given = ""
    model = next((model for pattern, model in _MODEL_OF.items() if re.search(pattern, name)), None)
    if made.refused and model is not None:
        completing = HuggingFace(PUBLISHED[model], "config.json")
        steps = 1000 if any("--steps" in problem.suggestion for problem in made.refused) else None
        made = migrate(document, completing=completing, steps=steps)
        given = (
            f"given `--hf-config` ({model}){f' and `--steps {steps}`' if steps else ''}, which the file leaves open; "
        )
    if made.refused:
        return Row(name, "graph mode", "refused", _reasons(made.refused))
    _account(name, document, made)
    ranks = f"{given}for {made.degrees.world_size} ranks"
    if made.unfit:
        return Row(name, "graph mode", "migrated, fails the check", f"{ranks}: {_reasons(made.unfit)}")
    kinds = Counter(item.kind for item in made.left)
    changes = ", ".join(f"`{item.path.rpartition('.')[2]}`" for item in made.left if item.kind is Kind.TRAINED)
    details = (
        f"{ranks}; {len(made.carried)} fields carried; left behind: {kinds[Kind.TRAINED]} that change training"
        f"{f' ({changes})' if changes else ''}, {kinds[Kind.COST]} that change memory or speed,"
        f" {kinds[Kind.NOTHING]} that are not needed"
    )
    return Row(name, "graph mode", "migrated, passes the check", details)


def _dynamic(name: str, document: Document) -> Row:
    first = examine(document, 8).problems
    if document.values and not document.has("parallelism"):
        return Row(name, "no training file", "refused", _reasons(first))
    fitting = [size for size in WORLD_SIZES if not examine(document, size).problems]
    if fitting:
        return Row(name, "dynamic graph", "passes the check", f"for {', '.join(map(str, fitting))} ranks")
    return Row(name, "dynamic graph", "refused", _reasons(first))


def _account(name: str, document: Document, made: Migration) -> None:
    """Each value of the old file is carried or left behind, and not both."""
    carried = [source for item in made.carried for source in item.sources]
    left = [item.path for item in made.left]
    for leaf in leaves(document.values):
        times = [any(is_within(leaf, path) for path in paths) for paths in (carried, left)]
        if sum(times) != 1:
            raise AssertionError(f"{name}: {leaf} is in {sum(times)} of the two lists")


def _reasons(problems: tuple[Problem, ...]) -> str:
    parts = []
    for problem in problems:
        value = "" if problem.value is None else f" `{problem.value}`"
        what = f"`{problem.path}`{value} (line {problem.line}) " if problem.path else ""
        parts.append(f"{what}{problem.rule}")
    return "; ".join(parts).replace("|", "\\|")


def table(versions: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The lines between the page's marks: a row for each file, once where versions agree."""
    rows: dict[Row, list[str]] = {}
    for version, files in versions.items():
        for name, text in files.items():
            rows.setdefault(row(name, text), []).append(version)
    totals: Counter[tuple[str, str]] = Counter()
    for item, having in rows.items():
        totals[item.kind, item.outcome] += len(having)
    yield f"{sum(totals.values())} files in the wheels of {' and '.join(versions)}:"
    yield ""
    yield "| format | what happens | files |"
    yield "|---|---|---|"
    yield from (f"| {kind} | {outcome} | {number} |" for (kind, outcome), number in sorted(totals.items()))
    yield ""
    yield "| file | in | format | what happens | details |"
    yield "|---|---|---|---|---|"
    for item, having in sorted(rows.items()):
        yield f"| {item.name} | {', '.join(having)} | {item.kind} | {item.outcome} | {item.details} |"


def _version(source: Path) -> str:
    found = re.search(r"\d+\.\d+\.\d+", source.name)
    return found[0] if found else source.name


def main() -> int:
    """Write the table, or compare it with the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+", type=Path, help="a wheel of MindFormers, or its unpacked folder")
    parser.add_argument("--compare", action="store_true", help="write nothing; fail where the page differs")
    arguments = parser.parse_args()
    lines = list(table({_version(source): yaml_files(source) for source in sorted(arguments.source)}))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])
    if arguments.compare:
        if made != page:
            print(f"{PAGE.name} is out of date: run this without --compare", file=sys.stderr)
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    print("\n".join(lines[:10]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
