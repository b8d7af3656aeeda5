// What the page does: loads, writes token by token, and says in words what goes wrong.

import init, { Engine } from "./web.js";
import { download, unpacked } from "./load.js";
import { Pages } from "./pages.js";
import { Picture } from "./picture.js";

const PROGRAM = "web_bg.wasm.gz";
const FILES = [PROGRAM, "config.json", "model.safetensors", "tokenizer.json", "kv_cache_scales.json"];
const $ = (id) => document.getElementById(id);
const begun = performance.now();

let engine = null;
let about = null; // who attends
let run = null; // the text that is being written, or was last
let others = []; // texts of the same prompt with other cache dtypes, the last one last
let vocabulary = []; // the text of each token

const said = (id) => (text) => { $(id).textContent = text; };
const words = (first, last) => JSON.stringify([...run.tokens.slice(first, last)].map((token) => vocabulary[token]).join(""));
const picture = new Picture($("picture"), $("legend"), (at) => words(at, at + 1), said("picture-cell"));
const pages = new Pages($("pages"), words, said("pages-cell"));

// One thing at a time: the engine must not be called while a call is awaited. What comes next stops the text that is being written.
let queue = Promise.resolve();
let [asked, doing, busy] = [0, 0, false];
const stopping = () => asked !== doing;
function act(task) {
  const mine = ++asked;
  queue = queue.then(async () => {
    [doing, busy] = [mine, true];
    try {
      await task();
    } catch (error) {
      fail(error, task);
    }
    busy = false;
    enable();
  });
  return queue;
}

function fail(error, task) {
  console.log(`the page says: ${error.message}`);
  if (error instanceof WebAssembly.RuntimeError) return crashed(error.message);
  // A read may fail before the device tells of its loss.
  const lost = engine?.lost() ?? (error.message.startsWith("device lost") && error.message);
  problem(
    lost ? `The GPU is gone (${lost.split(";")[0]}). A driver that was reset or a computer that slept does that. Try again, or go on with the CPU.`
      : error.message,
    () => act(lost ? reopen : task),
    Boolean(lost),
  );
  status(null);
}

/// After a panic, whose call is never answered: the engine is not to be used again.
function crashed(why) {
  engine = about = null;
  asked += 1;
  problem(`The page's program failed (${why}). Load the page again.`, () => location.reload(), false);
  status(null);
  enable();
}

addEventListener("error", (event) => {
  event.preventDefault();
  crashed(event.message);
});
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  crashed(event.reason?.message ?? event.reason);
});

let again = null;
function problem(text, retry, cpu) {
  $("problem").hidden = text === null;
  $("problem-text").textContent = text ?? "";
  $("on-cpu").hidden = !cpu;
  again = retry;
}

/// What is being done, and how far; `null` when nothing is to be waited for.
function status(text, done = null) {
  $("loading").hidden = text === null;
  $("status").textContent = text ?? "";
  if (done === null) $("progress").removeAttribute("value");
  else $("progress").value = done;
}

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const choose = (name, value) => { document.querySelector(`input[name=${name}][value=${value}]`).checked = true; };
const breathe = () => new Promise((done) => setTimeout(done));

async function load() {
  problem(null);
  status("Downloading the program and the model.", 0);
  const mega = (bytes) => (bytes / 1e6).toFixed(1);
  const files = await download(FILES, (got, all) =>
    status(`Downloading the program and the model: ${mega(got)} of ${mega(Math.max(got, all))} MB.`, got / Math.max(got, all)));
  status("Starting the program.");
  await breathe();
  const text = (name) => new TextDecoder().decode(files[name]);
  await init({ module_or_path: await WebAssembly.compile(await unpacked(PROGRAM, files[PROGRAM])) });
  engine = new Engine(text("config.json"), files["model.safetensors"], text("tokenizer.json"), text("kv_cache_scales.json"));
  vocabulary = engine.vocabulary();
  await reopen();
}

/// Opens the device that is wished for, or the CPU, and writes.
async function reopen() {
  problem(null);
  await open();
  await write();
}

async function open() {
  const kv = chosen("kv");
  let onGpu = chosen("device") === "gpu";
  let note = "";
  if (onGpu && !navigator.gpu) {
    onGpu = false;
    note = "This browser has no WebGPU here (a page needs https, or localhost, for it), so the attention runs on the CPU.";
  }
  about = null;
  if (onGpu) {
    status("Compiling the attention's kernels for your GPU.");
    await breathe();
    try {
      about = JSON.parse(await engine.open(kv, true));
    } catch (error) {
      if (error instanceof WebAssembly.RuntimeError) throw error;
      note = `WebGPU cannot be used here (${error.message}), so the attention runs on the CPU.`;
    }
  }
  if (!about) {
    status("Preparing the attention on the CPU.");
    await breathe();
    about = JSON.parse(await engine.open(kv, false));
    choose("device", "cpu");
  }
  $("note").hidden = note === "";
  $("note").textContent = note;
  $("adapter").textContent = about.gpu ? await adapter() : "none: the attention runs on the CPU, in WebAssembly";
  $("variant").textContent = `${about.variant}, ${about.kv} cache`;
  $("why").textContent = about.why;
}

/// The adapter as the browser names it, which tells the vendor and the architecture and little else.
async function adapter() {
  const info = (await navigator.gpu.requestAdapter({ powerPreference: "high-performance" }))?.info;
  const names = [info?.vendor, info?.architecture, info?.device, info?.description].filter(Boolean);
  return `${[...new Set(names)].join(" ") || "not named by this browser"}, WebGPU`;
}

async function write() {
  problem(null);
  const wish = { prompt: $("prompt").value, temperature: Number($("temperature").value), seed: Number($("seed").value) };
  const same = run && ["prompt", "temperature", "seed"].every((what) => run.wish[what] === wish[what]);
  if (!same) others = [];
  else if (run.kv !== about.kv) others = [...others.filter((other) => other.kv !== run.kv), run];
  others = others.filter((other) => other.kv !== about.kv);
  picture.clear();
  run = { wish, kv: about.kv, device: $("adapter").textContent, tokens: [], prompt: 0, ms: 0, decodes: 0, ended: false };
  render();
  status("Computing the prompt; the first run of a kernel compiles it.");
  await breathe();
  const start = performance.now();
  await engine.begin(wish.prompt, wish.temperature, wish.seed >>> 0);
  run.prompt = engine.prompt_tokens();
  run.tokens = engine.tokens();
  run.first = performance.now() - start;
  $("first").textContent = `${seconds(run.first)} for ${run.prompt} tokens of prompt`;
  if (!("firstToken" in document.body.dataset)) {
    document.body.dataset.firstToken = Math.round(performance.now() - begun);
    $("first").textContent += `, ${seconds(performance.now() - begun)} after the page began to load`;
  }
  status(null);
  await goOn();
}

/// Writes until there are as many tokens as wished for, or somebody stops it.
async function goOn() {
  problem(null);
  const count = Math.max(1, Number($("count").value) || 1);
  enable(true);
  let drawn = 0;
  while (!stopping() && !run.ended && run.tokens.length - run.prompt < count) {
    const start = performance.now();
    const token = await engine.next();
    run.ms += performance.now() - start;
    if (token === undefined) {
      run.ended = true;
      break;
    }
    run.decodes += 1;
    run.tokens = engine.tokens();
    render();
    // The picture costs host time: at most a third of it.
    if (performance.now() - drawn > 3 * (run.look ?? 0) + 50) {
      await look();
      drawn = performance.now();
    }
    await breathe();
  }
  await look();
  render();
  document.body.dataset.done = `${run.kv} ${about.gpu ? "gpu" : "cpu"} ${run.tokens.length - run.prompt}`;
}

async function look() {
  const start = performance.now();
  picture.show(await engine.weights(), about.layers, about.heads);
  run.look = performance.now() - start;
  pages.show(about.num_pages, about.page_size, [...engine.pages()], run.tokens.length - 1);
}

const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);

function render() {
  const text = $("text");
  const fresh = run.tokens.slice(run.prompt);
  const other = others.at(-1);
  const theirs = other ? other.tokens.slice(other.prompt) : [];
  const both = Math.min(fresh.length, theirs.length);
  let same = 0;
  while (same < both && fresh[same] === theirs[same]) same += 1;
  const differs = other && same < both;
  const span = (kind, content) => Object.assign(document.createElement(kind), { textContent: content });
  const prompt = span("span", run.tokens.length ? engine.text(run.tokens.slice(0, run.prompt)) : run.wish.prompt);
  prompt.className = "prompt";
  const end = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  text.replaceChildren(prompt);
  if (fresh.length) {
    // Some tokens are a part of a character, so neighbours are decoded together.
    const split = differs ? same : fresh.length;
    text.append(span("span", engine.text(fresh.slice(0, split))));
    if (differs) text.append(span("mark", engine.text(fresh.slice(split))));
  }
  if (end) text.scrollTop = text.scrollHeight;
  $("other").hidden = !differs;
  if (differs) $("other").textContent = `…${engine.text(theirs.slice(same))}`;
  $("changed").textContent = !other || !fresh.length ? ""
    : differs ? `With ${run.kv} the first ${same} new tokens are those of ${other.kv}; the marked ones are not. ${other.kv} went on:`
    : `With ${run.kv} all ${both} new tokens so far are those of ${other.kv}.`;
  if (!run.decodes) {
    for (const id of ["speed", "bandwidth"]) $(id).textContent = "–";
    return;
  }
  const [attention, bytes] = engine.traffic();
  const share = Math.round(100 * attention / run.ms);
  $("speed").textContent = `${(1000 * run.decodes / run.ms).toPrecision(3)} tokens/s, ${share} % of the time attention`;
  $("bandwidth").textContent = `${(bytes / attention / 1e6).toPrecision(3)} GB/s while it attends, ${(bytes / run.decodes / 1e6).toPrecision(3)} MB a token`;
}

async function check() {
  $("checked").textContent = "Checking…";
  await breathe();
  const found = JSON.parse(await engine.check());
  const error = found.error === null ? "not finite" : found.error.toExponential(2);
  $("checked").textContent = `Largest error ${error}, in layer ${found.layer + 1}, head ${found.head + 1}, of ${found.elements} elements up to ` +
    `${found.largest.toPrecision(3)}; the f64 oracle had the same query and the ${found.tokens} rows that the ${run.kv} cache holds.`;
}

/// What can be pressed.
function enable(writing = false) {
  $("write").disabled = !about;
  $("stop").disabled = !about || !run?.tokens.length || (!writing && run.ended);
  $("stop").textContent = writing ? "Stop" : "Go on";
  $("check").disabled = !about || !run?.decodes;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  act(about ? write : reopen);
});
$("stop").addEventListener("click", () => {
  if ($("stop").textContent === "Stop") act(async () => {});
  else {
    const count = run.tokens.length - run.prompt;
    if (Number($("count").value) <= count) $("count").value = count + 100;
    act(goOn);
  }
});
$("check").addEventListener("click", () => act(check));
$("dtypes").addEventListener("change", () => engine && act(reopen));
$("devices").addEventListener("change", () => engine && act(reopen));
$("again").addEventListener("click", () => again?.());
$("on-cpu").addEventListener("click", () => {
  choose("device", "cpu");
  act(reopen);
});

// A device may be lost while nothing is awaited.
setInterval(() => {
  const lost = !busy && about?.gpu && $("problem").hidden && engine.lost();
  if (lost) act(async () => { throw new Error(lost); });
}, 1000);

act(load);
