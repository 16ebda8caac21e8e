"""A run as one self-contained HTML page: what it learnt, how stale, what it threw away, where the time went, with what.

    write_whole(directory.report, page(directory, config))

Nothing is loaded from anywhere: pictures are SVG inside the page. Works for runs that are finished, dead or alive, and
for simulated ones; what was not recorded is left out.
"""

from staleflow.study.report.page import page

__all__ = ["page"]
