"""Pictures and tables for people: of memory plans and of networks."""

from __future__ import annotations

from weftplan.planner.hooks import set_reports
from weftplan.report import plan_html, plan_picture

set_reports(html=plan_html.plan_html, plot=plan_picture.plot_plan)
