"""The page of a report as a template: markup and styles, no script, nothing fetched.

Every value is escaped where it is put in; figures alone are markup of our own (embed.py). The
policy in its head forbids the page to load or run anything, whatever a results file held. The
choice between light and dark is three radio buttons and a selector, so it needs no script either;
without a choice the page follows the reader's system, and on paper it is light. LIGHT, DARK and
NIGHT in the styles stand for what page.py puts there: colours of figures, and of dark pages.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light; --page: #ffffff; --ink: #1f2328; --muted: #59636e; --line: #d0d7de;
  --soft: #f6f8fa; --warn: #9a6700; --warn-page: #fff8c5; LIGHT }
@media screen and (prefers-color-scheme: dark) {
  :root:not(:has(#theme-light:checked)) { NIGHT } }
@media screen { :root:has(#theme-dark:checked) { NIGHT } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { line-height: 1.2; } h2 { border-bottom: 1px solid var(--line); padding-bottom: .3rem;
  margin-top: 3rem; } h3 { margin-bottom: .3rem; }
a { color: inherit; } .place, .note { color: var(--muted); font-size: .875rem; }
.theme { border: 0; padding: 0; margin: 0; float: right; font-size: .875rem; }
.theme legend { float: left; color: var(--muted); padding: 0 .5rem 0 0; }
.theme label { padding-left: .25rem; white-space: nowrap; }
nav ol { columns: 20rem; padding-left: 1.5rem; }
.warnings { border-left: 4px solid var(--warn); background: var(--warn-page); padding: .5rem 1rem;
  margin: 1rem 0; } .warnings ul { margin: .25rem 0; padding-left: 1.25rem; }
figure { margin: 1.5rem 0; } figure svg, figure img { width: 100%; height: auto; display: block; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--muted); font-size: .875rem; }
.on-dark { display: none !important; }
@media screen and (prefers-color-scheme: dark) { :root:not(:has(#theme-light:checked)) {
  .on-dark { display: block !important; } .on-light { display: none !important; } } }
@media screen { :root:has(#theme-dark:checked) {
  .on-dark { display: block !important; } .on-light { display: none !important; } } }
.letters { position: absolute; width: 0; height: 0; overflow: hidden; }
.wide { overflow-x: auto; margin: 1rem 0; } .wide:focus-visible { outline: 2px solid var(--muted); }
table { border-collapse: collapse; font-size: .875rem; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left;
  vertical-align: top; } thead th { color: var(--muted); } .n { text-align: right; }
td.n { white-space: nowrap; }
td { font-variant-numeric: tabular-nums; } tbody th { font-weight: 400; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .875rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: .75rem; } .theme { float: none; }
  dl { grid-template-columns: 1fr; } }
@media print { body { max-width: none; font-size: 11px; } nav, .theme { display: none; }
  .wide { overflow: visible; } figure, table { break-inside: avoid; } h2, h3 { break-after: avoid; }
  details > * { display: block; } }
"""

NIGHT = """color-scheme: dark; --page: #0d1117; --ink: #e6edf3; --muted: #9198a1; --line: #30363d;
  --soft: #161b22; --warn: #d29922; --warn-page: #272115; DARK"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<svg class="letters" aria-hidden="true"><defs>{{ letters }}</defs></svg>
<header>
<fieldset class="theme"><legend>Page</legend>
<label><input type="radio" name="theme" id="theme-auto" checked> as the system</label>
<label><input type="radio" name="theme" id="theme-light"> light</label>
<label><input type="radio" name="theme" id="theme-dark"> dark</label>
</fieldset>
<h1>{{ title }}</h1>
</header>
<main>
<section aria-labelledby="summary">
<h2 id="summary">Summary</h2>
<p>{{ summary.sentences | join(" ") }}</p>
{{ warned(summary.warnings) }}
{% if summary.gains %}
<h3>Where speculation gains</h3>
<ul>{% for gain in summary.gains %}<li>{{ gain }}</li>{% endfor %}</ul>
{% endif %}
{% if summary.losses %}
<h3>Where speculation loses</h3>
<ul>{% for loss in summary.losses %}<li>{{ loss }}</li>{% endfor %}</ul>
{% endif %}
{% if overview %}{{ tabled(overview) }}{% endif %}
</section>
<nav aria-label="Parts">
<ol>
{% for part in parts %}
<li><a href="#part-{{ loop.index }}">{{ part.title }}</a></li>
{% endfor %}
</ol>
</nav>
{% for part in parts %}
<section aria-labelledby="part-{{ loop.index }}">
<h2 id="part-{{ loop.index }}">{{ part.title }}</h2>
<p class="place">{{ part.place }}</p>
{% for text in part.about %}<p>{{ text }}</p>{% endfor %}
{{ warned(part.warnings) }}
{% if part.findings %}
<ul>{% for text in part.findings %}<li>{{ text }}</li>{% endfor %}</ul>
{% endif %}
{% for shown in part.shown %}
<figure>{{ shown.markup }}
<figcaption>{{ shown.caption }}</figcaption></figure>
{% endfor %}
{% for table in part.tables %}{{ tabled(table) }}{% endfor %}
{% for origin in part.origins %}
<details><summary>Where these numbers come from{% if part.origins | length > 1 %}, run
{{ loop.index }}{% endif %}</summary>
<dl>{% for name, value in origin.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
</details>
{% endfor %}
</section>
{% endfor %}
{% if skipped %}
<section aria-labelledby="skipped">
<h2 id="skipped">Skipped</h2>
<dl>{% for item in skipped %}<dt>{{ item.place }}</dt><dd>{{ item.why }}</dd>{% endfor %}</dl>
</section>
{% endif %}
</main>
</body>
</html>
"""

MACROS = """
{%- macro warned(texts) -%}
{% if texts %}
<div class="warnings" role="note"><strong>Read with care</strong>
<ul>{% for text in texts %}<li>{{ text }}</li>{% endfor %}</ul></div>
{% endif %}
{%- endmacro -%}
{%- macro tabled(table) -%}
<div class="wide" tabindex="0" role="region" aria-label="{{ table.title }}">
<table><caption>{{ table.title }}</caption>
<thead><tr>{% for name in table.header %}
<th scope="col"{{ ' class="n"' | safe if table.numeric[loop.index0] }}>{{ name }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}
{% if loop.first %}<th scope="row">{{ cell }}</th>{% else %}
<td{{ ' class="n"' | safe if table.numeric[loop.index0] }}>{{ cell }}</td>{% endif %}
{% endfor %}</tr>
{% endfor %}
</tbody></table>
{% if table.note %}<p class="note">{{ table.note }}</p>{% endif %}
</div>
{%- endmacro -%}
"""
