"use strict";
// The gallery's filters, which stand in the address too, and the differences of two environments. Without this script the page
// shows every entry and every environment.
const filters = document.querySelector(".filters");
const entries = [...document.querySelectorAll(".entry")];
const differences = document.querySelector(".differences");
const settings = (id) =>
  new Map([...document.querySelectorAll(`#environment-${id} dl > div`)].map((line) => [...line.children].map((cell) => cell.textContent)));

function filter() {
  const [gpu, suite, model, words] = ["GPU", "Suite", "Model", "Configuration"].map((name) => filters.elements[name].value.trim());
  const wanted = words.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const entry of entries) {
    let here = 0;
    for (const row of entry.querySelectorAll("tbody tr")) {
      const text = `${row.dataset.kind} ${row.cells[0].textContent}`.toLowerCase();
      const fits = (!gpu || entry.dataset.gpu === gpu) && (!suite || entry.dataset.suite === suite) && (!model || row.dataset.model === model);
      row.hidden = !(fits && wanted.every((word) => text.includes(word)));
      here += !row.hidden;
    }
    entry.hidden = here === 0;
    shown += here;
  }
  for (const group of document.querySelectorAll(".gallery :is(.suite, .gpu)")) group.hidden = !group.querySelector(".entry:not([hidden])");
  const left = entries.filter((entry) => !entry.hidden);
  for (const entry of entries) entry.querySelector("details").open = left.length === 1 && entry === left[0];
  filters.querySelector("output").value =
    `${shown} configuration${shown === 1 ? "" : "s"} in ${left.length} ${left.length === 1 ? "entry" : "entries"}`;
  const said = new URLSearchParams([...new FormData(filters)].filter(([, value]) => value));
  history.replaceState(null, "", `${location.pathname}${String(said) && "?"}${said}${location.hash}`);
}

function compare() {
  const [from, to] = ["From", "To"].map((side) => differences.elements[side].value);
  const [before, after] = [from, to].map(settings);
  const table = document.createElement("table");
  const line = (kind, ...texts) => {
    const row = table.insertRow();
    for (const text of texts) row.appendChild(document.createElement(kind)).textContent = text;
  };
  line("th", "Setting", "From", "To");
  for (const name of new Set([...before.keys(), ...after.keys()])) {
    const [old, now] = [before, after].map((of) => of.get(name) ?? "not recorded");
    if (old !== now) line("td", name, old, now);
  }
  const same = document.createElement("p");
  same.textContent = "No difference: choose two environments.";
  document.querySelector("#differences").replaceChildren(table.rows.length > 1 ? table : same);
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  for (let element = target; element; element = element.parentElement) if (element.matches("details")) element.open = true;
  target?.scrollIntoView();
}

for (const [name, value] of new URLSearchParams(location.search)) if (filters.elements[name]) filters.elements[name].value = value;
filters.hidden = differences.hidden = false;
filters.addEventListener("input", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(filter));
differences.addEventListener("input", compare);
addEventListener("hashchange", openTarget);
if (location.search) filter();
compare();
openTarget();
