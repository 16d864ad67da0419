// @ts-check
/* Lines over time or rounds, by uPlot. A chart is a picture: what it shows is said in words too. */
import { html, useEffect, useRef } from "./html.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 170;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const COLORS = ["--lookup-line", "--recovered-line", "--draft-line", "--bonus-line"];

function color(name) {
  // A canvas knows no light-dark(): an element's computed colour does.
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const clock = (seconds) => new Date(1000 * seconds).toTimeString().slice(0, 8);

/** From zero to a little above the most; to `least` where all is zero or nothing is there. */
const above = (least) => (_, low, high) => [0, high > 0 ? Math.max(1.1 * high, least / 10) : least];

/** `data` are columns, the first of which is x; `series` are {label} of the others. The y-axis
    reaches to `least` where nothing is above zero, and to `most` always if that is given. */
export function Chart({ title, words, data, series, time = false, format = (v) => String(v),
  least = 1, most = undefined }) {
  const place = useRef(null);
  const made = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  const names = series.map((one) => one.label).join("|");
  useEffect(() => {
    const root = place.current;
    const build = () => {
      made.current?.destroy();
      const [ink, line] = [color("--muted"), color("--line")];
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
      made.current = new uPlot({
        width: Math.max(200, root.clientWidth), height: HEIGHT, legend: { live: true },
        cursor: { y: false },
        scales: { x: { time }, y: { range: most ? [0, most] : above(least) } },
        axes: [{ ...axis, space: 90, size: 36, values: (_, all) => all.map(time ? clock : String) }, { ...axis, size: 64, values: (_, all) => all.map(format) }],
        series: [{ value: (_, x) => (x === null ? "–" : time ? clock(x) : String(x)) }, ...series.map((one, i) => ({
          label: one.label, stroke: color(COLORS[i % COLORS.length]), width: 2,
          dash: DASHES[i % DASHES.length], spanGaps: true, points: { size: 4 },
          value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
        }))],
      }, latest.current, root);
    };
    build();
    const sized = new ResizeObserver(() => {
      const width = Math.max(200, root.clientWidth);
      if (made.current && made.current.width !== width) made.current.setSize({ width, height: HEIGHT });
    });
    sized.observe(root);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", build);
    scheme.addEventListener("change", build);
    return () => {
      sized.disconnect();
      removeEventListener("themechange", build);
      scheme.removeEventListener("change", build);
      made.current?.destroy();
      made.current = null;
    };
  }, [names, time]);
  useEffect(() => {
    made.current?.setData(data);
    // What the legend says while nobody points at a moment: the newest figures.
    if (made.current && made.current.cursor.idx == null) made.current.setLegend({ idx: data[0].length - 1 });
  });
  return html`
    <figure class="chart" aria-label=${title}>
      <figcaption><strong>${title}</strong> <span>${words}</span></figcaption>
      <div ref=${place} aria-hidden="true"></div>
    </figure>`;
}
