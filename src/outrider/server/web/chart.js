// @ts-check
/* Lines over time. A chart is a picture: what it shows is said in words too. */
import { html, useEffect, useRef, useState } from "./html.js";

const HEIGHT = 170;
const LEFT = 64;
const BOTTOM = HEIGHT - 28;
const TOP = 8;
/* Room for the words of a moment, and the seconds that may lie between two of them. */
const APART = 90;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];
const LINES = 4;

const clock = (seconds) => new Date(1000 * seconds).toTimeString().slice(0, 8);
const isGiven = (value) => value !== null && value !== undefined;

/** The multiples of `step` from `low` to `high`. */
function multiples(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * step);
}

/** A step of 1, 2 or 5 times a power of ten, of which at most LINES fit below `high`. */
function roundStep(high) {
  const unit = 10 ** Math.floor(Math.log10(high / LINES));
  return unit * [1, 2, 5, 10].find((times) => times * unit * LINES >= high * (1 - 1e-9));
}

/** The path through the points that are given; one alone is a short line. */
function path(xs, values) {
  const points = xs.flatMap((x, i) => (isGiven(values[i]) ? [[x, values[i]]] : []));
  if (points.length === 1) points.push([points[0][0] + 3, points[0][1]], [points[0][0] - 3, points[0][1]]);
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

/** `data` are columns, the first of which are seconds; `series` are {label} of the others. The y-axis
    reaches to `least` where nothing is above zero, and to `most` always if that is given. */
export function Chart({ title, words, data, series, format = String, least = 1, most = 0 }) {
  const place = useRef(null);
  const [width, resize] = useState(400);
  const [pointed, point] = useState(null);
  useEffect(() => {
    const sized = new ResizeObserver(() => resize(Math.max(200, place.current.clientWidth)));
    sized.observe(place.current);
    return () => sized.disconnect();
  }, []);
  const [times, ...columns] = data;
  const [begin, end] = [times[0], times.at(-1)];
  const span = Math.max(1, end - begin);
  const highest = columns.reduce((high, values) => values.reduce((a, b) => Math.max(a, b ?? 0), high), 0);
  const high = most || (highest > 0 ? Math.max(1.1 * highest, least / 10) : least);
  const x = (time) => LEFT + (time - begin) / span * (width - LEFT - 8);
  const y = (value) => BOTTOM - value / high * (BOTTOM - TOP);
  const step = STEPS.find((seconds) => seconds / span * (width - LEFT) >= APART) ?? span;
  const xs = times.map(x);
  // What the legend says while nobody points at a moment: the newest figures.
  const at = Math.min(pointed ?? times.length, times.length - 1);
  const follow = (event) => {
    const where = event.clientX - place.current.getBoundingClientRect().left;
    point(Math.max(0, Math.min(times.length - 1, Math.round(
      (where - LEFT) / (width - LEFT - 8) * (times.length - 1)))));
  };
  return html`
    <figure class="chart lines" aria-label=${title}>
      <figcaption><strong>${title}</strong> <span>${words}</span></figcaption>
      <div ref=${place} aria-hidden="true">
        <svg width=${width} height=${HEIGHT} onPointerMove=${follow} onPointerLeave=${() => point(null)}>
          ${multiples(0, high, roundStep(high)).map((value) => html`
            <path class="rule" d=${`M${LEFT} ${y(value).toFixed(1)}H${width - 8}`} />
            <text x=${LEFT - 8} y=${y(value) + 4} class="high">${format(value)}</text>`)}
          ${multiples(begin, end, step).map((time) => html`
            <text x=${Math.min(x(time), width - 32)} y=${HEIGHT - 8}>${clock(time)}</text>`)}
          ${pointed === null ? null : html`<path class="rule" d=${`M${xs[at]} ${TOP}V${BOTTOM}`} />`}
          ${columns.map((values, i) => html`
            <path class=${`line-${i}`} d=${path(xs, values.map((one) => (isGiven(one) ? y(one) : null)))} />`)}
        </svg>
        <p class="moment"><span>${clock(times[at])}</span>${series.map(({ label }, i) => html`
          <span><svg width="24" height="8"><path class=${`line-${i}`} d="M0 4H24" /></svg> ${label}${" "}
            <b>${isGiven(columns[i][at]) ? format(columns[i][at]) : "–"}</b></span>`)}</p>
      </div>
    </figure>`;
}
