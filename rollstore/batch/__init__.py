"""The packed batch that trainers and losses read, made from rows of the rollouts table."""

from rollstore.batch.collate import collate
from rollstore.batch.convert import as_behavior
from rollstore.batch.denominator import refuse_unusable, settings
from rollstore.batch.media import Medium
from rollstore.batch.padded import Padded, Responses, to_padded, to_responses
from rollstore.batch.select import select
from rollstore.batch.token_batch import Counts, Heads, Kind, Routing, Support, TokenBatch
from rollstore.batch.trainers import to_tinker, to_trl, to_verl
from rollstore.batch.vocabulary import within_vocabulary
from rollstore.usable import Transform, usable_as_behavior

__all__ = [
    "Counts",
    "Heads",
    "Kind",
    "Medium",
    "Padded",
    "Responses",
    "Routing",
    "Support",
    "TokenBatch",
    "Transform",
    "as_behavior",
    "collate",
    "refuse_unusable",
    "select",
    "settings",
    "to_padded",
    "to_responses",
    "to_tinker",
    "to_trl",
    "to_verl",
    "usable_as_behavior",
    "within_vocabulary",
]
