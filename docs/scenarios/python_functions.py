"""Write every function of Python's standard library as a line of JSON: short documents that every machine has.

python docs/scenarios/python_functions.py output/functions.jsonl
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # old string escapes in some of the files
library, target = Path(sysconfig.get_paths()["stdlib"]), Path(sys.argv[1])
target.parent.mkdir(parents=True, exist_ok=True)
with target.open("w", encoding="utf-8") as lines:
    for path in sorted(library.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines.write(json.dumps({"text": ast.get_source_segment(source, node)}) + "\n")
