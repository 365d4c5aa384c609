"""From the store to the trainer: packed batches of whole rollouts, in an order that can be taken up again anywhere."""

from rollstore.readers.torch.columns import COLUMNS, HEADS, as_arrow
from rollstore.readers.torch.following import RolloutFollower
from rollstore.readers.torch.loader import RolloutLoader
from rollstore.readers.torch.ranks import check_ranks

__all__ = ["COLUMNS", "HEADS", "RolloutFollower", "RolloutLoader", "as_arrow", "check_ranks"]
