"""Text, pictures and HTML pages about memory plans, live memory, and networks."""

from __future__ import annotations

from weftplan.report import memory_html, plan_buffers, plan_file, plan_html, plan_picture, plan_text
from weftplan.support import slots

slots.PLAN_REPORTS.fill(
    {
        "html": plan_html.plan_html,
        "plot": plan_picture.plot_plan,
        "bars": plan_buffers.bars,
        "timeline": plan_buffers.timeline,
        "alive_at_peak": plan_buffers.alive_at_peak,
        "summary": plan_text.summary,
        "compare": plan_text.compare,
        "left_out": plan_text.left_out,
        "to_json": plan_file.dumps,
        "from_json": plan_file.loads,
    }
)
slots.MEMORY_PAGE.fill(memory_html.memory_html)
