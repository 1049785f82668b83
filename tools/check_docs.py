"""Keep the documentation true: links lead somewhere, scenario files are valid, the reference of fields is today's."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

from parallel_config import ConfigError, load, plan
from parallel_config.reference import markdown

ROOT = Path(__file__).parents[1]
# By how many ranks a scenario can be planned; each file in docs/scenarios must be named here but for those of the
# specification, which are for eight.
SCENARIOS = {
    "experts.yaml": (4, 8),
    "first-run.yaml": (1, 2, 4),
    "hsdp.yaml": (2, 4),
    "packed-context.yaml": (4, 8),
    "three-dimensions.yaml": (4, 8),
}
FILES = sorted((ROOT / "docs" / "scenarios").glob("**/*.yaml"))


def broken_links(page: Path) -> list[str]:
    """Relative links and pictures of a page that do not exist."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [
        f"{page.relative_to(ROOT)}: {target} does not exist"
        for target in targets
        if "://" not in target and not (page.parent / target).exists()
    ]


def invalid_scenarios() -> list[str]:
    """Scenario files that are not listed or cannot be planned."""
    found = []
    for path in FILES:
        world_sizes = (8,) if path.parent.name == "specification" else SCENARIOS.get(path.name)
        if world_sizes is None:
            found.append(f"{path.name} is not listed in {Path(__file__).name}")
        for world_size in world_sizes or ():
            try:
                plan(load(path), world_size)
            except ConfigError as error:
                found.append(f"{path.name} with {world_size} ranks: {error}")
    return found


def old_reference() -> list[str]:
    """Whether docs/fields.md is what the schema declares."""
    page = ROOT / "docs" / "fields.md"
    if page.read_text(encoding="utf-8") == markdown():
        return []
    return ["docs/fields.md is not what the schema declares: parallel-config fields --markdown > docs/fields.md"]


def main() -> int:
    """Print what is wrong; exit code 1 if anything is."""
    warnings.simplefilter("ignore")  # a scenario may use extensions, which warn
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
    problems = [problem for page in pages for problem in broken_links(page)]
    problems += invalid_scenarios() + old_reference()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(pages)} pages and {len(FILES)} scenarios checked")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
