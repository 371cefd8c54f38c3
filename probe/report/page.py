"""The HTML page's style sheet and script: plain CSS and JavaScript, written into the page so that it opens offline.

The script does three things that a printed page cannot: it filters by name (`#filter=TEXT` at the end of the page's
address sets the filter), draws the visible part of the heat map, and says what lies under the pointer. Without it the
page still shows the verdict, the table and the plots.
"""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--soft:#5a6470;--line:#d8dde3;--card:#f6f8fa;--good:#1a7f37;
--bad:#c1281d;--maybe:#8a5a00;--blue:#2563a8;--band:#9db8d8;--focus:#0b57d0;
--h0:#eef3f8;--h1:#d9e6f3;--h2:#b9d2ea;--h3:#8db6dc;--h4:#5c95c9;--h5:#f7c9a0;--h6:#ef8a5a;--h7:#d4442f;--h8:#8e1414}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa5b1;--line:#333a43;--card:#1c2127;
--good:#4cc26a;--bad:#ff7b6e;--maybe:#e3b341;--blue:#79b0ec;--band:#34506f;--focus:#8ab4f8;
--h0:#1d2630;--h1:#22374b;--h2:#284c6d;--h3:#32689a;--h4:#4a8bc4;--h5:#7a4a24;--h6:#b5602f;--h7:#e0573f;--h8:#ff9184}}
*{box-sizing:border-box}[hidden]{display:none!important}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.15rem;margin:34px 0 8px}h3{font-size:.95rem;margin:0 0 2px}
p{margin:6px 0;overflow-wrap:anywhere}
code,.name{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.9em;overflow-wrap:anywhere}
.soft{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}.maybe{color:var(--maybe)}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;margin:12px 0}
.verdict{border-left:6px solid currentColor}.verdict p{color:var(--fg)}
table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:6px 10px;
border-bottom:1px solid var(--line)}th{font-size:.82rem;color:var(--soft);font-weight:600}
td.num{font-variant-numeric:tabular-nums;white-space:nowrap}td:last-child{min-width:14em}.worst{font-size:.86rem;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(260px,1fr));gap:12px}
.plots figure{margin:0}svg{width:100%;height:auto;display:block}svg text{font-size:10px;fill:var(--soft)}
.grid{stroke:var(--line)}.limit{stroke:var(--bad);stroke-dasharray:4 3}.band{fill:var(--band);opacity:.55}
.line{fill:none;stroke:var(--blue);stroke-width:1.6}.dot{fill:var(--blue)}.dot.above{fill:var(--bad)}
.bar{fill:var(--blue)}.bar.above{fill:var(--bad)}.outline{fill:none;stroke:var(--fg);stroke-width:1.4}
input[type=search]{font:inherit;width:100%;max-width:420px;padding:7px 10px;border:1px solid var(--line);
border-radius:6px;background:var(--bg);color:var(--fg)}:focus-visible{outline:2px solid var(--focus);outline-offset:1px}
.map{border:1px solid var(--line);border-radius:8px;overflow:auto;height:min(70vh,560px);position:relative}
.head,.row{display:grid;grid-template-columns:var(--label) repeat(var(--steps),minmax(14px,1fr));height:20px;
min-width:calc(var(--label) + var(--steps)*14px)}.head{position:sticky;top:0;background:var(--bg);z-index:2;
font-size:.72rem;color:var(--soft)}.head span{text-align:center;overflow:hidden}
.rows{position:relative}.row{position:absolute;left:0;right:0}.row .name{position:sticky;left:0;background:var(--bg);
white-space:nowrap;overflow:hidden;text-overflow:ellipsis;direction:rtl;text-align:left;
padding:0 6px;font-size:.75rem;line-height:20px;z-index:1}
.cell{margin:1px;border-radius:2px}.first{outline:2px solid var(--fg);outline-offset:-1px}
.none{background:repeating-linear-gradient(45deg,transparent 0 3px,var(--line) 3px 4px)}
.scale{display:flex;flex-wrap:wrap;gap:4px 12px;font-size:.8rem;color:var(--soft);margin:8px 0}
.scale i{display:inline-block;width:14px;height:14px;border-radius:3px;vertical-align:-2px;margin-right:4px}
.tree,.tree ul{list-style:none;padding-left:18px;margin:2px 0}.tree{padding-left:0}.tree i{display:inline-block;
width:12px;height:12px;border-radius:3px;vertical-align:-1px;margin-right:6px}
pre{background:var(--bg);border:1px solid var(--line);border-radius:8px;padding:10px 12px;font-size:.84rem;
font-family:ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}.paste{user-select:all}
abbr{text-decoration:underline dotted;text-underline-offset:3px;cursor:help}
.terms{margin:10px 0;font-size:.86rem}.terms dt{display:inline;font-weight:600}.terms dt::after{content:": "}
.terms dd{display:inline;margin:0}.terms div{margin:2px 0}.verdict ul{color:var(--fg)}
ul{margin:6px 0;padding-left:20px}summary{cursor:pointer}.tip{min-height:1.6em}
:root{--label:300px}
@media(min-width:641px){#runs td:nth-child(2),#runs td:nth-child(5){white-space:nowrap}}
@media(max-width:640px){:root{--label:150px}h1{font-size:1.25rem}
table.stack thead{position:absolute;left:-9999px}table.stack tr{display:block;border:1px solid var(--line);
border-radius:8px;margin:10px 0;padding:6px 4px}table.stack td{display:grid;grid-template-columns:7.5em 1fr;gap:8px;
border:0;padding:3px 8px;overflow-wrap:anywhere}table.stack td.num{white-space:normal}td:last-child{min-width:0}
table.stack td::before{content:attr(data-label);color:var(--soft);font-size:.8rem}}
"""

LEVELS = (1e-2, 1e-1, 0.3, 0.6, 1.0, 3.0, 10.0, 100.0)
"""Upper ends of the heat map's colours in difference / tolerance; above the last is one more. Up to 1 they are blue."""


def level(ratio: float) -> int:
    """Return the number of a ratio's colour, as the script does."""
    return next((number for number, most in enumerate(LEVELS) if ratio <= most), len(LEVELS))


SCRIPT = """
"use strict";
(function () {
  var filter = document.getElementById("filter"), none = document.getElementById("nothing");
  function fits(text) {
    return text.toLowerCase().indexOf(filter.value.trim().toLowerCase()) >= 0;
  }
  function filterTable() {
    document.querySelectorAll("[data-filter]").forEach(function (each) {
      each.hidden = !fits(each.dataset.filter);
    });
  }
  var source = document.getElementById("grid"), link = /^#filter=(.*)$/.exec(location.hash);
  if (link) filter.value = decodeURIComponent(link[1]);
  if (!source) { filter.addEventListener("input", filterTable); filterTable(); return; }
  var data = JSON.parse(source.textContent), raw = atob(data.codes), steps = data.steps.length;
  var map = document.getElementById("map"), rows = document.getElementById("rows");
  var tip = document.getElementById("tip");
  var TALL = 20, shown = [];
  function code(series, step) {
    var at = 2 * (series * steps + step);
    return raw.charCodeAt(at) + 256 * raw.charCodeAt(at + 1);
  }
  function ratio(c) {
    return c === 0 ? NaN : c === 1 ? 0 : Math.pow(10, -8 + 16 * (c - 2) / 65533);
  }
  function level(value) {
    for (var i = 0; i < data.levels.length; i++) if (value <= data.levels[i]) return i;
    return data.levels.length;
  }
  function words(c) {
    if (c === 0) return "not judged";
    if (c === 1) return "identical";
    if (c === 65535) return "not equal, not finite, or 1e8 x the tolerance or more";
    return "difference / tolerance = " + Number(ratio(c).toPrecision(3));
  }
  function draw() {
    var from = Math.max(0, Math.floor(map.scrollTop / TALL) - 5);
    var to = Math.min(shown.length, from + Math.ceil(map.clientHeight / TALL) + 12);
    var part = document.createDocumentFragment();
    for (var i = from; i < to; i++) {
      var series = shown[i], row = document.createElement("div"), name = document.createElement("span");
      row.className = "row"; row.style.top = i * TALL + "px";
      row.setAttribute("role", "row");
      // Names are cut at their head where space is short: what tells them apart stands at the end.
      name.className = "name"; name.title = data.labels[series];
      name.appendChild(document.createElement("bdi")).textContent = data.labels[series];
      name.setAttribute("role", "rowheader");
      row.appendChild(name);
      for (var s = 0; s < steps; s++) {
        var c = code(series, s), cell = document.createElement("span");
        cell.className = "cell" + (c ? "" : " none");
        if (c) cell.style.background = "var(--h" + level(ratio(c)) + ")";
        if (data.first && data.first[0] === series && data.first[1] === s) {
          cell.className += " first"; cell.setAttribute("aria-current", "true");
        }
        cell.dataset.at = series + " " + s;
        cell.setAttribute("role", "cell");
        cell.setAttribute("aria-label", "step " + data.steps[s] + ": " + words(c));
        row.appendChild(cell);
      }
      part.appendChild(row);
    }
    rows.style.height = shown.length * TALL + "px";
    rows.replaceChildren(part);
  }
  function apply() {
    filterTable();
    shown = [];
    for (var i = 0; i < data.labels.length; i++) {
      if (fits(data.labels[i]) || fits(data.families[data.family[i]])) shown.push(i);
    }
    var families = shown.map(function (series) { return data.family[series]; });
    document.querySelectorAll("[data-family]").forEach(function (each) {
      each.hidden = families.indexOf(+each.dataset.family) < 0;
    });
    none.hidden = shown.length > 0;
    document.getElementById("count").textContent = shown.length + " of " + data.labels.length + " quantities";
    map.scrollTop = 0;
    draw();
  }
  rows.addEventListener("pointerover", function (event) {
    if (!event.target.dataset.at) return;
    var at = event.target.dataset.at.split(" "), series = +at[0], s = +at[1], c = code(series, s);
    var rank = c ? ", rank " + data.ranks[series * steps + s] : "";
    tip.textContent = data.labels[series] + ", step " + data.steps[s] + rank + ": " + words(c);
  });
  function jump() {
    filter.value = ""; apply();
    if (data.first) map.scrollTop = Math.max(0, data.first[0] * TALL - map.clientHeight / 2);
    draw();
  }
  document.getElementById("jump").addEventListener("click", jump);
  map.addEventListener("scroll", draw);
  window.addEventListener("resize", draw);
  filter.addEventListener("input", apply);
  if (link) apply(); else jump();
})();
"""
