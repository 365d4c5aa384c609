"""What recording and reading take on this machine and at one place, beside plain files: `rollstore bench`.

`measure` makes a store and files of its own at the place, and leaves nothing there.
"""

from rollstore.bench.cases import SIZES, Plan, measure
from rollstore.bench.figures import Figure, Runs
from rollstore.bench.place import Place

__all__ = ["SIZES", "Figure", "Place", "Plan", "Runs", "measure"]
