"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const STEPS = 253, OVER = 254; // codes of a picture: up to STEPS, beyond the colours, then not finite
const DASHES = [["mean_", "solid"], ["worst_", "dot"], ["_before", "dash"], ["_after", "dashdot"]];
const dash = (kind) => (DASHES.find(([part]) => kind.includes(part)) || ["", "longdash"])[1];
const drawn = new Set();

// ---------------------------------------------------------------- drawing in the reader's theme

function draw(id, traces, layout) {
  if (!find(id)) return; // one chart without a place must not cost the others
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue("--ink").trim(), line = css.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  drawn.add(id);
  // On narrow screens each name has a line of its own. The place is as high as its chart, or what follows lies over it.
  const named = innerWidth < 560 && layout.showlegend !== false ? traces.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap").length : 0;
  const height = (layout.height || (named > 4 ? 360 : 0)) + (layout.barmode || named > 4 ? 20 * named : 0);
  if (height) find(id).style.height = `${height}px`;
  Plotly.react(find(id), traces, {
    autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', sans-serif", size: 13, color: ink },
    margin: { l: 60, r: 24, t: 36, b: 50 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: axis.linecolor, activecolor: ink },
    ...layout, ...(height ? { height } : {}),
    xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", ...layout.legend },
  }, {
    responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [["toImage", "resetScale2d"]],
  });
}

function drawFigures() {
  for (const [id, { data: traces, layout }] of Object.entries(data.figures)) draw(id, traces, layout);
}

// ---------------------------------------------------------------- accuracy curves

function drawCurves() {
  if (!find("curves")) return;
  const axis = find("curve-axis").value, words = data.curves.axes[axis];
  const kinds = [...find("curve-kinds").querySelectorAll("input:checked")].map((box) => box.value);
  const traces = [], without = [];
  const bands = axis === "round" ? data.curves.bands : [];
  const banded = (number, kind) => bands.some((band) => band.runs.includes(number) && band.y[kind]);
  for (const band of bands) {
    for (const kind of kinds.filter((name) => band.y[name])) {
      const { mean, low, high } = band.y[kind], colour = data.colours[band.runs[0]];
      const shared = { type: "scatter", mode: band.round.length > 1 ? "lines" : "markers", x: band.round, connectgaps: true, legendgroup: `${band.runs[0]} ${kind}` };
      const edge = { ...shared, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      const name = `${data.names[band.runs[0]]} and ${band.runs.length - 1} more seed${band.runs.length > 2 ? "s" : ""}`;
      traces.push({ ...edge, mode: "lines", y: low }, { ...edge, mode: "lines", y: high, fill: "tonexty", fillcolor: `${colour}33` });
      traces.push({
        ...shared, y: mean, name: kinds.length > 1 ? `${name} · ${data.curves.kinds[kind]}` : name,
        line: { color: colour, dash: kinds.length > 1 ? dash(kind) : "solid", width: 2 },
        hovertemplate: `round %{x}: %{y:${data.curves.hover}}`,
      });
    }
  }
  data.curves.runs.forEach(({ x, y }, number) => {
    if (!x[axis].length) {
      if (x.round.length) without.push(data.names[number]);
      return;
    }
    for (const kind of kinds.filter((name) => y[name] && !banded(number, name))) {
      const short = x[axis].length <= 60;
      traces.push({
        type: "scatter", mode: short ? "lines+markers" : "lines", x: x[axis], y: y[kind], connectgaps: true,
        name: kinds.length > 1 ? `${data.names[number]} · ${data.curves.kinds[kind]}` : data.names[number],
        line: { color: data.colours[number], dash: kinds.length > 1 ? dash(kind) : "solid", width: 2 }, marker: { size: 5 },
        customdata: x.round, hovertemplate: `round %{customdata}: %{y:${data.curves.hover}}`,
      });
    }
  });
  draw("curves", traces, {
    xaxis: { title: { text: words }, rangemode: "tozero", ...(axis === "round" ? data.curves.ticks : {}) }, yaxis: { title: { text: data.curves.metric }, tickformat: data.curves.tick },
    showlegend: true, height: 460,
  });
  const entities = { "&lt;": "<", "&gt;": ">", "&amp;": "&" };
  const names = without.map((name) => name.replace(/&(lt|gt|amp);/g, (word) => entities[word])).join(", ");
  find("curve-note").textContent = names && `Not measured in every round of ${names}: ${words}.`;
}

// ---------------------------------------------------------------- pictures

function decode(picture, columns) {
  const codes = atob(picture.codes), span = picture.high - picture.low, rows = [];
  let beyond = 0;
  for (let at = 0; at < codes.length; at++) {
    const code = codes.charCodeAt(at);
    if (at % columns === 0) rows.push([]);
    rows[rows.length - 1].push(
      code < OVER ? picture.low + (code * span) / STEPS : code === OVER ? picture.over[beyond++] : null);
  }
  return rows;
}

// `picture`: codes to be decoded, or rows of numbers. `range`: pictures that share their colours.
function drawPicture(id, picture, x, y, range, layout, hover) {
  const column = x.map(String), row = y.map(String);
  const ends = range.length ? range : [{ low: 0, high: 1 }];
  const high = Math.max(...ends.map((other) => other.high)), low = Math.min(...ends.map((other) => other.low));
  draw(id, [{
    type: "heatmap", z: Array.isArray(picture) ? picture : picture ? decode(picture, x.length) : [], x: column, y: row, zmin: low, zmax: high,
    colorscale: "Viridis", hovertemplate: `${hover}<extra></extra>`, hoverongaps: false,
    colorbar: { thickness: 12, outlinewidth: 0, tickformat: layout.tickformat || "" },
  }], {
    height: layout.height, xaxis: { type: "category", title: { text: layout.x }, showgrid: false, tickangle: 0, nticks: 16 },
    yaxis: { type: "category", title: { text: layout.y }, autorange: "reversed", showgrid: false,
      ...(layout.all ? { tickmode: "linear", dtick: 1 } : {}) },
  });
}

const layersHeight = (layers) => Math.max(280, 150 + 17 * layers.length);

function drawRelation() {
  if (!find("round")) return;
  const round = data.relation.rounds[find("round").value], client = find("client") && find("client").value;
  const same = find("same").checked;
  const everywhere = (kind, constant) => data.relation.runs.filter((run) => !run.constant === !constant)
    .flatMap((run) => Object.values(run.pictures).map(kind)).filter(Boolean);
  find("round-number").textContent = round;
  find("round").setAttribute("aria-valuetext", `round ${round}`);
  data.relation.runs.forEach(({ pictures, layers, constant, names = {} }, number) => {
    const called = (one) => names[one] ?? `${one}`;
    if (!Object.keys(pictures).length) return;
    // A run that ended before this round, or has no file of it, shows the round before; the title says so.
    const kept = Object.keys(pictures).map(Number);
    const at = Math.max(...kept.filter((other) => other <= round), Math.min(...kept));
    const now = pictures[at];
    const mean = layers.length > 1 ? `mean over ${layers.length} layers` : "one layer";
    const when = at === round ? `round ${round}` : `round ${at} (${round} is not there)`;
    find(`overview-title-${number}`).textContent = `${when}, who receives from whom (${mean})`;
    drawPicture(`overview-${number}`, now.overview, now.sources.map(called), now.receivers.map(called),
      same ? everywhere((picture) => picture.overview, constant) : [now.overview],
      { height: 440, x: "source client", y: "receiving client" },
      "client %{y} receives from client %{x}<br>weight %{z:.4~g}");
    if (client === null) return;
    const own = now.clients[client];
    find(`client-title-${number}`).textContent = own ? `${when}, what client ${called(client)} receives of each layer`
      : `${when}: client ${called(client)} is not ${now.receivers.includes(Number(client)) ? "shown layer by layer" : "in the cohort"}`;
    drawPicture(`client-${number}`, own, own ? now.sources.map(called) : [], own ? layers : [],
      same ? everywhere((picture) => picture.clients[client], constant) : [own].filter(Boolean),
      { height: Math.max(layersHeight(layers), 440), x: "source client", y: "", all: true },
      "layer %{y} of client %{x}<br>weight %{z:.4~g}");
  });
}

function drawShares() {
  const way = find("way") && find("way").value;
  data.shares.filter((share) => !share.constant).forEach((share) => {
    const at = share.run;
    find(`share-title-${at}`).textContent = way === "up" ? "sent" : "received";
    drawPicture(`share-${at}`, share[way], share.rounds, share.layers, [{ low: 0, high: 1 }],
      { height: layersHeight(share.layers), x: "round", y: "", all: true, tickformat: ".0%" },
      "round %{x}, %{y}<br>%{z:.0%} of the cohort");
  });
}

function drawSplits() {
  data.splits.forEach(({ clients, classes, counts, most }, at) => {
    drawPicture(`split-${at}`, counts, clients, classes, [{ low: 0, high: most }],
      { height: Math.max(280, 130 + 22 * classes.length), x: "client", y: "class" },
      "client %{x}, class %{y}<br>%{z:.0f} training samples");
  });
}

// ---------------------------------------------------------------- what the reader does

let playing = null;

function stop() {
  clearInterval(playing);
  playing = null;
  find("play").textContent = "▶ Play";
}

function play() {
  const slider = find("round");
  if (playing) { stop(); return; }
  if (slider.value === slider.max) slider.value = 0;
  drawRelation();
  find("play").textContent = "❚❚ Pause";
  playing = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    drawRelation();
    if (slider.value === slider.max) stop();
  }, 700);
}

function drawAll() {
  drawFigures();
  drawCurves();
  drawRelation();
  drawShares();
  drawSplits();
}

const on = (id, event, act) => find(id) && find(id).addEventListener(event, act);
on("curve-axis", "change", drawCurves);
on("curve-kinds", "change", drawCurves);
on("round", "input", drawRelation);
on("client", "change", drawRelation);
on("same", "change", drawRelation);
on("play", "click", play);
on("way", "change", drawShares);
on("constant", "toggle", () => find("constant").querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
for (const [event, printed] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { // paper is white, and narrower than a screen
    document.documentElement.classList.toggle("printed", printed);
    drawAll();
    for (const id of drawn) Plotly.Plots.resize(find(id));
  });
}
drawAll();
