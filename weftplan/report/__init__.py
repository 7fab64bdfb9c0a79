"""Pictures and tables for people: of memory plans, of memory as it is, and of networks."""

from __future__ import annotations

from weftplan.planner.hooks import provide
from weftplan.report import memory_html, plan_html, plan_picture
from weftplan.storage.snapshot import set_page

provide(html=plan_html.plan_html, plot=plan_picture.plot_plan)
set_page(memory_html.memory_html)
