"use strict";
// Filter, sort, copy, zoom, and the trace handed to Perfetto. The page shows all of its facts without any of it.
const each = (selector, act, within = document) => within.querySelectorAll(selector).forEach(act);
const table = document.getElementById("tests");
const search = document.getElementById("search");
const only = document.getElementById("only");

function filter() {
  const words = search.value.toLowerCase();
  each("tbody tr", (row) => {
    const fits = (!only.value || row.dataset.outcome === only.value) && row.textContent.toLowerCase().includes(words);
    row.hidden = !fits;
  }, table);
}
search.addEventListener("input", filter);
only.addEventListener("change", filter);

each(".sort", (button) => {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const column = [...heading.parentNode.children].indexOf(heading);
    const up = heading.getAttribute("aria-sort") !== "ascending";
    each("th", (other) => other.removeAttribute("aria-sort"), table);
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[column].dataset.sort || row.children[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => key(a).localeCompare(key(b), "en", { numeric: true }));
    table.tBodies[0].append(...(up ? rows : rows.reverse()));
  });
});

// One failure at a time: a link to it opens it, j and k go on and back.
const failures = [...document.querySelectorAll("details.one")];
function open(one) {
  for (const other of failures) other.open = other === one;
  one.scrollIntoView();
}
function openLinked() {
  const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const one = linked && linked.closest("details.one");
  if (one) open(one);
}
addEventListener("hashchange", openLinked);
openLinked();
document.addEventListener("keydown", (event) => {
  const step = { j: 1, k: -1 }[event.key];
  if (!step || !failures.length || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const at = failures.findIndex((one) => one.open);
  open(failures[(at + step + failures.length) % failures.length]);
});

each("[data-copy]", (button) => {
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
    } catch {
      button.textContent = button.dataset.copy; // a page from a file may not be allowed to: then it can be selected
    }
  });
});

// Lanes: + and - or the wheel with Ctrl zoom about the pointer, arrows and dragging move, 0 shows all again.
each(".zoomable", (box) => {
  const svg = box.querySelector("svg.lanes");
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  let view = { x: 0, width };
  const show = () => {
    view.width = Math.min(width, Math.max(width / 400, view.width));
    view.x = Math.min(width - view.width, Math.max(0, view.x));
    svg.setAttribute("viewBox", `${view.x} 0 ${view.width} ${height}`);
    svg.setAttribute("preserveAspectRatio", view.width === width ? "xMidYMid" : "none");
    svg.style.height = view.width === width ? "" : `${svg.dataset.height}px`;
    svg.dataset.zoom = (width / view.width).toFixed(2);
  };
  const zoom = (factor, at = 0.5) => {
    if (view.width === width) svg.dataset.height = svg.getBoundingClientRect().height;
    const middle = view.x + at * view.width;
    view = { x: middle - at * view.width * factor, width: view.width * factor };
    show();
  };
  const tools = document.createElement("div");
  tools.className = "zoom";
  for (const [label, title, act] of [
    ["+", "zoom in", () => zoom(0.5)], ["−", "zoom out", () => zoom(2)],
    ["all", "show all", () => { view = { x: 0, width }; show(); }],
  ]) {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = label; button.title = title;
    button.addEventListener("click", act);
    tools.append(button);
  }
  box.prepend(tools);
  box.addEventListener("keydown", (event) => {
    const acts = {
      "+": () => zoom(0.5), "-": () => zoom(2), "0": () => { view = { x: 0, width }; show(); },
      ArrowLeft: () => { view.x -= view.width / 8; show(); }, ArrowRight: () => { view.x += view.width / 8; show(); },
    };
    if (acts[event.key] && event.target === box) { event.preventDefault(); acts[event.key](); }
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const bounds = svg.getBoundingClientRect();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - bounds.left) / bounds.width);
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons !== 1 || view.width === width) return;
    view.x -= (event.movementX * view.width) / svg.getBoundingClientRect().width;
    show();
  });
});

// Perfetto's page takes a trace by a message: nothing is uploaded.
each("[data-perfetto]", (button) => {
  button.addEventListener("click", () => {
    const article = button.closest("article");
    const trace = new TextEncoder().encode(article.querySelector("script.trace").textContent).buffer;
    const origin = "https://ui.perfetto.dev";
    const page = window.open(origin);
    const knock = setInterval(() => page.postMessage("PING", origin), 100);
    const answer = (event) => {
      if (event.origin !== origin || event.data !== "PONG") return;
      clearInterval(knock);
      removeEventListener("message", answer);
      page.postMessage({ perfetto: { buffer: trace, title: article.dataset.name } }, origin);
    };
    addEventListener("message", answer);
    setTimeout(() => clearInterval(knock), 20000);
  });
});
