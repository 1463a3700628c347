// The view Ask: runs the question, keeps it in the address, and draws the rows as they were chosen. A module, so that its
// names do not meet those of view.js, whose functions it calls.

const form = document.getElementById("ask");
const text = form.elements.q;
const answer = document.getElementById("answer");
const fields = document.getElementById("parameters");
const named = text.value;
let choice = JSON.parse(answer.dataset.chosen);
let running;

// The fields of the parameters that the SQL has now.
function parameters() {
  const names = new Set([...text.value.matchAll(/\{(\w+):[^}]+\}/g)].map((found) => found[1]));
  const known = new Set();
  for (const input of fields.querySelectorAll("input")) {
    const name = input.name.replace("param_", "");
    if (names.has(name)) known.add(name);
    else input.parentElement.remove();
  }
  for (const name of names) {
    if (known.has(name)) continue;
    const label = Object.assign(document.createElement("label"), { textContent: `${name} ` });
    label.append(Object.assign(document.createElement("input"), { name: `param_${name}` }));
    fields.append(label);
  }
}

function question() {
  const asked = new URLSearchParams(new FormData(form));
  asked.delete(form.elements.name.value && text.value === named ? "q" : "name");
  for (const [key, value] of [...asked]) if (key.startsWith("param_") && !value) asked.delete(key);
  for (const [key, value] of Object.entries(choice)) asked.set(key, value);
  return asked;
}

function keep() {
  const address = `/ask?${question()}`;
  if (address !== location.pathname + location.search) history.pushState(null, "", address);
}

async function run() {
  running?.abort();
  running = new AbortController();
  answer.hidden = false;
  answer.setAttribute("aria-busy", "true");
  keep();
  try {
    const reply = await fetch("/ask/rows", { method: "POST", body: question(), signal: running.signal });
    if (reply.redirected || reply.status === 401) { location.reload(); return; }
    const told = await reply.text();
    if (reply.ok) answer.innerHTML = told; // The server has escaped every value.
    else answer.textContent = told;
    localTimes(answer);
    redraw();
  } catch (error) {
    if (error.name === "AbortError") return;
    answer.textContent = `no answer: ${error.message}`;
  }
  answer.setAttribute("aria-busy", "false");
}

function redraw() {
  const source = answer.querySelector("script[type='application/json']");
  if (!source) return;
  const [holder, unplotted] = [answer.querySelector(".plot"), document.getElementById("unplotted")];
  const { kind, x, y, by } = Object.fromEntries([...answer.querySelectorAll("select")].map((one) => [one.name, one.value]));
  const data = JSON.parse(source.textContent);
  const at = data.columns.indexOf(x);
  const drawable = kind !== "table" && x && y && (kind !== "heat" || by);
  const numbers = kind === "heat" || data.rows.some((row) => number(row[at]) !== null);
  data.drawn = { plot: kind, x, y, ...(by ? { by } : {}) };
  source.textContent = JSON.stringify(data);
  source.className = drawable && numbers ? "rows" : "";
  unplotted.hidden = kind === "table" || (drawable && numbers);
  unplotted.textContent = !drawable ? `Choose x and y${kind === "heat" ? " and by" : ""}.` : `The column ${x} holds no numbers and no times.`;
  holder.replaceChildren();
  holder.hidden = !source.className;
  draw(answer);
}

form.addEventListener("submit", (event) => {
  if (event.submitter?.hasAttribute("formaction")) return;
  event.preventDefault();
  run();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
});
text.addEventListener("input", parameters);
answer.addEventListener("change", () => {
  choice = Object.fromEntries([...answer.querySelectorAll("select")].filter((one) => one.value).map((one) => [one.name, one.value]));
  keep();
  redraw();
});
addEventListener("popstate", () => location.reload());
addEventListener("resize", redraw);
if (text.value.trim()) run();
