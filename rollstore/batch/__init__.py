"""The packed batch that trainers and losses read, made from rows of the rollouts table."""

from rollstore.batch.collate import collate
from rollstore.batch.convert import as_behavior
from rollstore.batch.denominator import refuse_unusable, settings
from rollstore.batch.select import select
from rollstore.batch.token_batch import Counts, Heads, Kind, Routing, Support, TokenBatch
from rollstore.usable import Transform, usable_as_behavior

__all__ = [
    "Counts",
    "Heads",
    "Kind",
    "Routing",
    "Support",
    "TokenBatch",
    "Transform",
    "as_behavior",
    "collate",
    "refuse_unusable",
    "select",
    "settings",
    "usable_as_behavior",
]
