"""Finished, stopped or broken runs, read again and shown as one page (`lockstep report RUN`).

run_data   what the run wrote             series, scales   numbers worth drawing; axes
facts      figures and sentences          curves, charts   the charts of a report; one chart as SVG
page       the page, from report.html     html             templates of pages, for other packages too
"""

from lockstep.report.page import write_report as write_report
