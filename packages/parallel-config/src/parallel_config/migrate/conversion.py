"""A file of MindFormers' graph mode as a file of the format read here, or the reasons why there is none."""

from __future__ import annotations

from attrs import Factory, evolve, frozen

from parallel_config.document import Document
from parallel_config.formats import (
    TRAINING_MODES,
    NamedModel,
    is_graph_mode,
    missing_model,
    mixed,
    model_type_of,
    named_model,
)
from parallel_config.loading import examine
from parallel_config.migrate.batch import batch
from parallel_config.migrate.data import data
from parallel_config.migrate.degrees import Degrees, degrees
from parallel_config.migrate.draft import Carried, Draft, Left
from parallel_config.migrate.memory import memory
from parallel_config.migrate.model import SECTION, HuggingFace, model
from parallel_config.migrate.optimization import learning_rate, optimizer
from parallel_config.migrate.placement import placement
from parallel_config.migrate.render import new_text
from parallel_config.migrate.running import running
from parallel_config.migrate.without import reason
from parallel_config.problems import Problem, in_order
from parallel_config.schema.model import MODEL_DEFAULTS
from parallel_config.source import read


@frozen
class Migration:
    """What became of a file.

    refused:    why there is no new file; empty where there is one.
    text:       the new file, with comments; empty where there is none.
    degrees:    what the old file fixes, the number of ranks among it.
    carried:    each field of the new file, and the old ones that it was made of.
    left:       each value of the old file without a counterpart, and why.
    unfit:      what `check` finds wrong in the new file for that number of ranks.
    """

    document: Document
    refused: tuple[Problem, ...] = ()
    text: str = ""
    degrees: Degrees = Factory(Degrees)
    carried: tuple[Carried, ...] = ()
    left: tuple[Left, ...] = ()
    unfit: tuple[Problem, ...] = ()


def migrate(
    document: Document,
    *,
    world_size: int | None = None,
    steps: int | None = None,
    completing: HuggingFace | None = None,
) -> Migration:
    """Convert a file. Never raises on what is in it: a file that cannot be converted says why in `refused`.

    world_size: ranks, for a data-parallel file, which leaves them open.
    steps:      length of the run, for data whose size the file leaves open.
    completing: the model's config.json, for a file that leaves the model's sizes to it.
    """
    first = _refused_at_once(document, completing)
    if first:
        return Migration(document, refused=first)
    draft = Draft(document)
    found = _convert(draft, world_size, steps, completing)
    if draft.problems:
        return Migration(document, refused=in_order(draft.problems), degrees=found)
    for path in list(draft.uncovered()):
        why, kind = reason(path, draft.get(path))
        draft.leave(path, why, kind)
    left = sorted(draft.left, key=lambda item: item.line or 0)
    made = Migration(document, degrees=found, carried=tuple(draft.carried), left=tuple(left))
    text = new_text(document.filename or "", found, made.carried, made.left)
    return evolve(made, text=text, unfit=examine(read(text, "NEW.yaml"), found.world_size).problems)


def _refused_at_once(document: Document, completing: HuggingFace | None) -> tuple[Problem, ...]:
    """What makes reading on pointless: faults of YAML, another format, a model that does not exist, no training."""
    if document.broken or document.problems:
        return document.problems
    if not is_graph_mode(document):
        rule = "has none of the sections of MindFormers' graph mode: there is nothing to convert"
        return (document.problem("", "the file", rule, "Look at it with parallel-config check."),)
    other = mixed(document)
    if other is not None:
        return (other,)
    named = named_model(document) if completing is None else _completed_name(completing)
    if named is not None and named.model_type is None:
        return (missing_model(document, named),)
    mode = document.values.get("run_mode", "train")
    if mode not in TRAINING_MODES:
        return (document.problem("run_mode", mode, "trains nothing", "This project trains and evaluates."),)
    return ()


def _completed_name(completing: HuggingFace) -> NamedModel | None:
    name = completing.values.get("model_type")
    return NamedModel("model", name, model_type_of(name)) if isinstance(name, str) else None


def _convert(draft: Draft, world_size: int | None, steps: int | None, completing: HuggingFace | None) -> Degrees:
    """Carry all that can be carried; what cannot is in the draft's problems."""
    found = degrees(draft, world_size)
    length = batch(draft, found, steps)
    model_type = _model_type(draft, completing)
    if model_type is not None:
        model(draft, model_type, completing)
        layers = draft.new_value("model.num_hidden_layers")
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            layers = int(MODEL_DEFAULTS[model_type]["num_hidden_layers"])
        placed = placement(draft, found, layers)
        if placed is not None:
            memory(draft, placed)
    optimizer(draft)
    learning_rate(draft, length or 1)
    data(draft)
    running(draft)
    return found


def _model_type(draft: Draft, completing: HuggingFace | None) -> str | None:
    """The model's type; refused where its sizes are not in the file."""
    if completing is not None:
        completed = _completed_name(completing)
        if completed is None:
            draft.refuse(SECTION, f"is completed by {completing.name}, which names no model_type", "Name another file.")
        return completed.model_type if completed is not None else None
    named = named_model(draft.old)
    if draft.get("pretrained_model_dir"):
        rule = "holds the config.json with the rest of the model's sizes, which is not here"
        draft.refuse("pretrained_model_dir", rule, "Say where that file is: --hf-config PATH.")
    elif named is None or not named.path.startswith(SECTION):
        draft.refuse(SECTION, "does not say which model it is", "Write model_type, or say --hf-config PATH.")
    else:
        return named.model_type
    return None
