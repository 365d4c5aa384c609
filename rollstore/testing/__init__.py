"""What to test with: a file system that crashes, valid records at random, and the check that every writer passes.

`rollstore.testing.strategies` needs hypothesis and is imported by itself.
"""

from rollstore.testing.filesystem import PAGE, Fault, MachineCrash, MemoryFilesystem
from rollstore.testing.writer import CASES, Case, Output, WriterFailure, check_writer

__all__ = [
    "CASES",
    "PAGE",
    "Case",
    "Fault",
    "MachineCrash",
    "MemoryFilesystem",
    "Output",
    "WriterFailure",
    "check_writer",
]
