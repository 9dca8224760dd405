"""Finished, stopped or broken runs, read again, each as one page (`lockstep report`) or together (`lockstep compare`).

run_data, rank_history   what the run, and each of its ranks, wrote
facts, curves            figures and sentences; the charts of a report      limits, explanation   `lockstep explain`
series, charts, html     numbers worth drawing; a chart as SVG; templates of pages, for other packages too
page, comparison         the pages, from report.html and compare.html
"""

from lockstep.report.comparison import compare as compare
from lockstep.report.comparison import write_comparison as write_comparison
from lockstep.report.page import write_report as write_report
