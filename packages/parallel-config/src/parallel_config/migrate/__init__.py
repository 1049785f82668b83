"""Files of MindFormers' graph mode, turned into files of the format read here."""

from __future__ import annotations

from parallel_config.migrate.conversion import Migration, migrate
from parallel_config.migrate.draft import Carried, Kind, Left
from parallel_config.migrate.model import HuggingFace

__all__ = ["Carried", "HuggingFace", "Kind", "Left", "Migration", "migrate"]
