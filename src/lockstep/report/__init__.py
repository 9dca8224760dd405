"""Finished, stopped or broken runs, read again and shown as one page (`lockstep report RUN`)."""

from lockstep.report.composing import write_report as write_report
