"""Finished, stopped or broken runs, read again, each as one page (`lockstep report`) or together (`lockstep compare`).

run_data    what the run wrote             series, scales   numbers worth drawing; axes
facts       figures and sentences          curves, charts   the charts of a report; one chart as SVG
page        the page, from report.html     html             templates of pages, for other packages too
comparison  runs beside one another        rank_history, rank_charts   what each rank did
"""

from lockstep.report.comparison import compare as compare
from lockstep.report.comparison_page import write_comparison as write_comparison
from lockstep.report.page import write_report as write_report
