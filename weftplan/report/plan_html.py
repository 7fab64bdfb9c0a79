"""A memory plan as one self-contained HTML page: bars over time, peak line, hover, a table to sort and filter."""

from __future__ import annotations

import html
import json
from pathlib import Path

from weftplan.planner.plan import PlannedGraph
from weftplan.report.plan_rows import buffer_rows, live_bytes

_LEFT_OUT = (
    "Left out of the figure: arguments, their gradients and auxiliary states (listed above), optimizer states, the kvstore's "
    "buffers, the CUDA context and library workspaces, and what the pool below rounds up or keeps."
)


def plan_html(planned: PlannedGraph, *, title: str = "memory plan") -> str:
    """The page as text. It loads nothing from anywhere."""
    plan = planned.memory
    rows = buffer_rows(planned)
    steps = len(planned.order)
    devices = sorted({row.device for row in rows})
    data = {
        "steps": steps,
        "forward": planned.num_forward_nodes,
        "devices": [
            {"name": d, "peak": peak, "alive": live_bytes(rows, steps, d)}
            for d in devices
            for peak in [next(v for c, v in plan.peak_by_device.items() if str(c) == d)]
        ],
        "rows": [row.as_dict() for row in rows],
        "nodes": [planned.graph.nodes[n].name for n in planned.order],
    }
    facts = [
        ("planned peak", plan.peak),
        ("lower bound of these buffers in this order", plan.lower_bound),
        ("without any sharing", plan.unshared_bytes),
        *((f"{what} (given by the caller)", nbytes) for what, nbytes in planned.external_nbytes.items()),
    ]
    fact_rows = "".join(f"<tr><td>{html.escape(k)}</td><td class=n>{v:,}</td></tr>" for k, v in facts)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in planned.notes)
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        _PAGE.replace("@TITLE@", html.escape(title))
        .replace("@FACTS@", fact_rows)
        .replace("@NOTES@", notes)
        .replace("@LEFT_OUT@", html.escape(_LEFT_OUT))
        .replace("@STRATEGY@", html.escape(plan.strategy))
        .replace("@DATA@", text)
    )


def save_plan_html(planned: PlannedGraph, path: Path, *, title: str = "memory plan") -> Path:
    """Write :func:`plan_html` to ``path``; returns it."""
    path.write_text(plan_html(planned, title=title), encoding="utf-8")
    return path


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<style>
body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}
h1{font-size:1.3em}table{border-collapse:collapse}td,th{padding:.15em .6em;border-bottom:1px solid #ddd;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}th{cursor:pointer;position:sticky;top:0;background:#f6f6f6}
canvas{width:100%;height:420px;border:1px solid #ccc;display:block}
#tip{position:fixed;display:none;background:#222;color:#fff;padding:.4em .6em;border-radius:4px;font-size:12px;
white-space:pre;pointer-events:none;z-index:9}
#list{max-height:480px;overflow:auto;border:1px solid #ddd;margin-top:.5em}input{padding:.3em;width:22em}
.legend span{margin-right:1.5em}
</style></head><body>
<h1>@TITLE@</h1>
<table>@FACTS@</table><p>Strategy: @STRATEGY@. @LEFT_OUT@</p><ul>@NOTES@</ul>
<p class="legend">Device <select id="device"></select>
<span style="color:#c00">&#8212; planned peak</span><span>&#8212; bytes alive</span><span style="color:#888">&#8942; forward ends</span></p>
<canvas id="plot"></canvas><div id="tip"></div>
<p><input id="filter" placeholder="filter by name, operator, kind, shape"> <span id="count"></span></p>
<div id="list"><table id="table"><thead></thead><tbody></tbody></table></div>
<script>
const D=@DATA@;
const fmt=n=>n.toLocaleString("en-US");
const color=s=>{let h=0;for(const c of s)h=(h*31+c.charCodeAt(0))%360;return "hsl("+h+",60%,62%)"};
const sel=document.getElementById("device");D.devices.forEach((d,i)=>sel.add(new Option(d.name,i)));
const cv=document.getElementById("plot"),cx=cv.getContext("2d"),tip=document.getElementById("tip");
let boxes=[];
function draw(){
 const dev=D.devices[sel.value||0];if(!dev)return;
 const W=cv.width=cv.clientWidth*devicePixelRatio,H=cv.height=cv.clientHeight*devicePixelRatio;
 cx.clearRect(0,0,W,H);boxes=[];const top=dev.peak*1.06||1,X=t=>t/D.steps*W,Y=b=>H-b/top*H;
 for(const r of D.rows){if(r.device!==dev.name)continue;
  const x=X(r.first),y=Y(r.address+r.nbytes),w=Math.max(1,X(r.last)-x),h=Math.max(1,Y(r.address)-y);
  cx.fillStyle=r.kind==="workspace"?"#bbb":color(r.operator);cx.fillRect(x,y,w,h);
  cx.strokeStyle="rgba(0,0,0,.35)";cx.lineWidth=.5;cx.strokeRect(x,y,w,h);boxes.push([x,y,w,h,r]);}
 cx.strokeStyle="#c00";cx.lineWidth=2;cx.beginPath();cx.moveTo(0,Y(dev.peak));cx.lineTo(W,Y(dev.peak));cx.stroke();
 cx.strokeStyle="#000";cx.lineWidth=1.5;cx.beginPath();
 dev.alive.forEach((b,t)=>{cx.lineTo(X(t),Y(b));cx.lineTo(X(t+1),Y(b))});cx.stroke();
 cx.strokeStyle="#888";cx.setLineDash([4,4]);cx.beginPath();cx.moveTo(X(D.forward),0);cx.lineTo(X(D.forward),H);cx.stroke();
 cx.setLineDash([]);
}
const say=r=>r.name+"\\n"+fmt(r.nbytes)+" bytes, "+r.dtype+" ("+r.shape.join(", ")+")\\nmade by "+r.maker+" ("+r.operator+
 ") at step "+r.first+"\\nread last by "+r.last_reader+"; free from step "+r.last+"\\n"+r.kind+", storage "+r.storage+", address "+fmt(r.address);
cv.onmousemove=e=>{const b=cv.getBoundingClientRect(),k=devicePixelRatio,x=(e.clientX-b.left)*k,y=(e.clientY-b.top)*k;
 for(let i=boxes.length-1;i>=0;i--){const q=boxes[i];if(x>=q[0]&&x<=q[0]+q[2]&&y>=q[1]&&y<=q[1]+q[3]){
  tip.style.display="block";tip.style.left=Math.min(e.clientX+14,innerWidth-420)+"px";tip.style.top=e.clientY+14+"px";
  tip.textContent=say(q[4]);return;}}tip.style.display="none"};
cv.onmouseleave=()=>tip.style.display="none";
const cols=[["name",0],["operator",0],["kind",0],["nbytes",1],["shape",0],["dtype",0],["first",1],["last",1],["maker",0],["last_reader",0],["device",0]];
let by="nbytes",down=true;
const head=document.querySelector("#table thead"),body=document.querySelector("#table tbody");
function list(){
 const f=document.getElementById("filter").value.toLowerCase();
 let rows=D.rows.filter(r=>!f||JSON.stringify(Object.values(r)).toLowerCase().includes(f));
 rows.sort((a,b)=>{const p=a[by],q=b[by],c=typeof p==="number"?p-q:String(p).localeCompare(String(q));return down?-c:c});
 document.getElementById("count").textContent=rows.length+" buffers, "+fmt(rows.reduce((s,r)=>s+r.nbytes,0))+" bytes";
 body.replaceChildren(...rows.slice(0,2000).map(r=>{const tr=document.createElement("tr");
  for(const [c,n] of cols){const td=document.createElement("td");if(n)td.className="n";
   td.textContent=c==="shape"?"("+r.shape.join(", ")+")":n?fmt(r[c]):r[c];tr.append(td)}return tr}));
}
const tr=document.createElement("tr");
for(const [c,n] of cols){const th=document.createElement("th");if(n)th.className="n";th.textContent=c.replace("_"," ");
 th.onclick=()=>{down=by===c?!down:n===1;by=c;list()};tr.append(th)}head.append(tr);
document.getElementById("filter").oninput=list;sel.onchange=draw;onresize=draw;draw();list();
</script></body></html>
"""
