"""What a newcomer meets first: a file whose corpus has not been built."""

from __future__ import annotations

from pathlib import Path

import parallel_config
import pytest
from parallel_trainer import prepare
from parallel_trainer.data.indexed import IndexedCorpus
from parallel_trainer.errors import UserError

SCENARIOS = sorted((Path(__file__).parents[3] / "docs" / "scenarios").rglob("*.yaml"))


@pytest.mark.filterwarnings("ignore::parallel_config.ConfigWarning")
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_whose_corpus_is_not_built_names_the_commands_that_build_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very commands that the page and the head of the file give, in their order."""
    monkeypatch.chdir(tmp_path)
    config = parallel_config.load(path)
    degrees = config.parallelism
    world = degrees.tensor_parallel * degrees.context_parallel * degrees.pipeline_parallel
    found = None
    for ranks in (world, 2 * world, 4 * world):
        try:
            prepare(config, ranks)
        except parallel_config.ConfigError:
            continue
        except UserError as error:
            found = str(error)
            break
    (prefix,) = config.train_dataset.dataloader.config.data_path
    assert found is not None
    assert f"corpus {prefix}" in found
    source = "--input output/functions.jsonl" if prefix == "output/functions" else "--python-stdlib"
    assert "run in the same directory: " in found
    assert f"parallel-train data build {source} --output {prefix}" in found


def test_any_other_missing_corpus_names_the_command_with_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"parallel-train data build --input TEXTS --output .*no corpus'"):
        IndexedCorpus.open(tmp_path / "no corpus")
