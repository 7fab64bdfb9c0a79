"""Pictures and tables for people: of memory plans and of networks."""

from __future__ import annotations

from weftplan.planner.hooks import set_reports
from weftplan.report.plan_html import plan_html
from weftplan.report.plan_picture import plot_plan

__all__ = ["plan_html", "plot_plan"]

set_reports(html=plan_html, plot=plot_plan)
