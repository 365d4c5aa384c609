"""One page about a store: what its sections show, each with its margin, and the plots of them."""

from rollstore.diagnose.report.report import Report, report
from rollstore.diagnose.report.section import Section

__all__ = ["Report", "Section", "report"]
