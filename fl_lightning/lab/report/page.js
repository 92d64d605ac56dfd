"use strict";
// The relation by round: heatmaps on canvases, a slider, a choice of client.
const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const STEPS = 253, OVER = 254, MISSING = 255;
const palette = Uint8Array.from(atob(data.palette), (character) => character.charCodeAt(0));

// Rows of numbers: null where one is not finite.
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

const number = (value) => `${Number(value.toPrecision(4))}`;

function colour(level) {
  const at = 3 * Math.round(255 * Math.min(1, Math.max(0, level)));
  return `rgb(${palette[at]},${palette[at + 1]},${palette[at + 2]})`;
}

// `range`: pictures that share their colours. `hover`: the words for a row, a column and a weight.
function draw(id, picture, columns, rows, range, names, hover) {
  const canvas = find(id), pen = canvas.getContext("2d"), note = find(id.replace("-", "-note-"));
  const width = canvas.parentElement.clientWidth, scale = devicePixelRatio;
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue("--ink").trim(), font = "12px system-ui, sans-serif";
  note.textContent = "";
  pen.font = font;
  const widest = (labels) => Math.max(0, ...labels.map((label) => pen.measureText(label).width));
  const left = Math.min(widest(rows), width / 3) + 34, right = 74, top = 6;
  const turned = widest(columns) > (width - left - right) / Math.min(columns.length, 10);
  const bottom = 34 + (turned ? Math.min(widest(columns), 160) : 12);
  const high = Math.max(...range.map((other) => other.high)), low = Math.min(...range.map((other) => other.low));
  const body = picture ? Math.max(120, Math.min(rows.length * 22, Math.max(380, 14 * rows.length))) : 0;
  const height = body ? top + body + bottom : 0;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  if (!picture) return;
  pen.scale(scale, scale);
  pen.font = font;
  const values = decode(picture, columns.length), span = high - low || 1;
  const across = (width - left - right) / columns.length, down = body / rows.length;
  values.forEach((row, y) => row.forEach((value, x) => {
    pen.fillStyle = value === null ? css.getPropertyValue("--missing") : colour((value - low) / span);
    pen.fillRect(left + x * across, top + y * down, Math.ceil(across), Math.ceil(down));
  }));
  for (let at = 0; at < body; at++) { // the scale of colours
    pen.fillStyle = colour(1 - at / body);
    pen.fillRect(width - right + 12, top + at, 10, 1.5);
  }
  pen.fillStyle = ink;
  pen.fillText(number(high), width - right + 26, top + 10);
  pen.fillText(number(low), width - right + 26, top + body);
  const step = (labels, room, size) => Math.ceil(labels.length / Math.max(1, Math.floor(room / size)));
  pen.textAlign = "right";
  for (let y = 0; y < rows.length; y += step(rows, body, 14)) {
    pen.fillText(rows[y], left - 6, top + (y + 0.5) * down + 4, left - 24);
  }
  const each = turned ? 15 : widest(columns) + 10;
  for (let x = 0; x < columns.length; x += step(columns, width - left - right, each)) {
    pen.save();
    pen.translate(left + (x + 0.5) * across + (turned ? 4 : 0), top + body + (turned ? 6 : 15));
    if (turned) pen.rotate(-Math.PI / 2); else pen.textAlign = "center";
    pen.fillText(columns[x], 0, 0, turned ? 160 : undefined);
    pen.restore();
  }
  pen.textAlign = "center";
  pen.fillText(names[0], left + (width - left - right) / 2, height - 6);
  pen.translate(12, top + body / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText(names[1], 0, 0);
  canvas.onmousemove = (event) => {
    const x = Math.floor((event.offsetX - left) / across), y = Math.floor((event.offsetY - top) / down);
    const value = values[y] && values[y][x];
    note.textContent = value === undefined || value === null ? "" : `${hover(rows[y], columns[x])}: weight ${number(value)}`;
  };
}

function drawRelation() {
  if (!find("round")) return;
  const round = data.rounds[find("round").value], client = find("client") && find("client").value;
  const same = find("same").checked;
  const everywhere = (kind, constant) => data.runs.filter((run) => !run.constant === !constant)
    .flatMap((run) => Object.values(run.pictures).map(kind)).filter(Boolean);
  find("round-number").textContent = round;
  find("round").setAttribute("aria-valuetext", `round ${round}`);
  data.runs.forEach(({ pictures, layers, constant, names = {} }, run) => {
    const called = (one) => names[one] ?? `${one}`;
    if (!Object.keys(pictures).length) return;
    // A run that ended before this round, or has no file of it, shows the round before; the title says so.
    const kept = Object.keys(pictures).map(Number);
    const at = Math.max(...kept.filter((other) => other <= round), Math.min(...kept));
    const now = pictures[at], sources = now.sources.map(called);
    const mean = layers.length > 1 ? `mean over ${layers.length} layers` : "one layer";
    const when = at === round ? `round ${round}` : `round ${at} (${round} is not there)`;
    find(`overview-title-${run}`).textContent = `${when}, who receives from whom (${mean})`;
    draw(`overview-${run}`, now.overview, sources, now.receivers.map(called),
      same ? everywhere((picture) => picture.overview, constant) : [now.overview],
      ["source client", "receiving client"], (y, x) => `client ${y} receives from client ${x}`);
    if (client === null) return;
    const own = now.clients[client];
    find(`client-title-${run}`).textContent = own ? `${when}, what client ${called(client)} receives of each layer`
      : `${when}: client ${called(client)} is not ${now.receivers.includes(Number(client)) ? "shown layer by layer" : "in the cohort"}`;
    draw(`client-${run}`, own, sources, layers,
      same ? everywhere((picture) => picture.clients[client], constant) : [own].filter(Boolean),
      ["source client", "layer"], (y, x) => `layer ${y} of client ${x}`);
  });
}

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

const on = (id, event, act) => find(id) && find(id).addEventListener(event, act);
for (const id of ["client", "same"]) on(id, "change", drawRelation);
on("round", "input", drawRelation);
on("play", "click", play);
on("constant", "toggle", drawRelation);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawRelation);
addEventListener("resize", drawRelation);
for (const [event, printed] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { // paper is white, and narrower than a screen
    document.documentElement.classList.toggle("printed", printed);
    drawRelation();
  });
}
drawRelation();
