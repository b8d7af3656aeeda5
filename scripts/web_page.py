#!/usr/bin/env python3
"""The page of examples/web in headless Chromium: serves a built folder, drives it through chromedriver, and says what is wrong.

    web_page.py FOLDER --chromedriver PATH --capabilities JSON [--shot PNG]
"""

import argparse
import base64
import functools
import http.server
import json
import os
import pathlib
import struct
import subprocess
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
GENERATE = ROOT / "examples/generate"
FIRST_TOKEN_MS = 8000
MOST_BYTES = 14_000_000

# Before the page's own scripts: errors that nobody caught, and the device, to lose it.
WATCH = """
window.uncaught = [];
addEventListener("error", (event) => uncaught.push(String(event.message)));
addEventListener("unhandledrejection", (event) => uncaught.push(String(event.reason)));
if (self.GPUAdapter) {
  const request = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (...args) { return window.device = await request.apply(this, args); };
}
"""
NO_WEBGPU = "Object.defineProperty(Navigator.prototype, 'gpu', { get: () => undefined });"


class Files(http.server.SimpleHTTPRequestHandler):
    """A static server; `missing` are not there."""

    missing = set()
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript", ".wasm": "application/wasm"}

    def do_GET(self):
        if self.path.lstrip("/") in self.missing:
            self.send_error(404)
        else:
            super().do_GET()

    def end_headers(self):
        # What a visit before has loaded is no download.
        self.send_header("cache-control", "no-store")
        super().end_headers()

    def log_message(self, *_args):
        pass


class Browser:
    """A session of WebDriver."""

    def __init__(self, driver, capabilities, site):
        self.port, self.site = free_port(), site
        self.process = subprocess.Popen([driver, f"--port={self.port}", "--log-level=SEVERE"], stdout=subprocess.DEVNULL)
        for _ in range(100):
            try:
                self.call("GET", "/status")
                break
            except OSError:
                time.sleep(0.1)
        body = {"capabilities": {"alwaysMatch": capabilities}}
        self.session = f"/session/{self.call('POST', '/session', body)['sessionId']}"
        self.scripts = []

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"WebDriver: {error.read().decode()[:2000]}") from None

    def post(self, path, **body):
        return self.call("POST", self.session + path, body)

    def devtools(self, command, **params):
        return self.post("/goog/cdp/execute", cmd=command, params=params)

    def js(self, script, *args):
        return self.post("/execute/sync", script=script, args=list(args))

    def text(self, element):
        return self.js("return document.getElementById(arguments[0]).textContent", element)

    def seen(self, element):
        return self.js("return !document.getElementById(arguments[0]).hidden", element)

    def open(self, *scripts):
        """Loads the page anew, with these scripts before its own."""
        for known in self.scripts:
            self.devtools("Page.removeScriptToEvaluateOnNewDocument", identifier=known)
        self.scripts = [self.devtools("Page.addScriptToEvaluateOnNewDocument", source=it)["identifier"] for it in (WATCH, *scripts)]
        self.post("/url", url=self.site)

    def wait(self, script, what, seconds=90):
        end = time.monotonic() + seconds
        while not (value := self.js(script)):
            if time.monotonic() > end:
                body = self.js("return document.body.innerText")
                raise SystemExit(f"not within {seconds} s: {what}\n{body}\nuncaught: {self.js('return uncaught')}")
            time.sleep(0.1)
        return value

    def write(self, **fields):
        """Fills the form, presses Write, and gives the new text once it is done."""
        self.js(
            """delete document.body.dataset.done;
            for (const [id, value] of Object.entries(arguments[0])) document.getElementById(id).value = value;
            document.getElementById("write").click();""",
            fields,
        )
        return self.finished()

    def choose(self, name, value):
        self.js(
            """delete document.body.dataset.done;
            document.querySelector(`input[name=${arguments[0]}][value=${arguments[1]}]`).click();""",
            name,
            value,
        )
        return self.finished()

    def finished(self):
        self.wait("return document.body.dataset.done", "the text is written")
        return self.js("return [...document.querySelectorAll('#text > :not(.prompt)')].map((it) => it.textContent).join('')")

    def close(self):
        self.call("DELETE", self.session)
        self.process.terminate()
        self.process.wait()


def free_port():
    with http.server.HTTPServer(("127.0.0.1", 0), None) as server:
        return server.server_address[1]


def goldens():
    """The greedy text by cache dtype, which the native CPU backend has to write too: `cargo test -p generate`."""
    with open(GENERATE / "tests/goldens/goldens.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        about = json.loads(file.read(length))["__metadata__"]
    return {name.removeprefix("text."): text for name, text in about.items() if name.startswith("text.")}


def expect(what, got, good):
    print(f"{'ok ' if good else 'BAD'} {what}: {got}", flush=True)
    if not good:
        raise SystemExit(1)


def size(folder):
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    expect("bytes of the page", f"{total:,}", total <= MOST_BYTES)


def first_visit(page):
    page.open()
    first = int(page.wait("return document.body.dataset.firstToken", "a first token"))
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    expect(
        f"milliseconds to the first token, download and compiles included, at a load of {load:.1f} on {cores} cores",
        first, first <= FIRST_TOKEN_MS * max(1.0, load / cores),
    )
    page.finished()
    done = page.js("return document.body.dataset.done")
    expect("first text", done, done.startswith("f16 gpu "))
    for element in ("adapter", "variant", "speed", "bandwidth", "first"):
        print(f"    {element}: {page.text(element)}")
    expect("a variant and a rate", page.text("speed"), "tokens/s" in page.text("speed") and "GB/s" in page.text("bandwidth"))


def texts(page):
    """Every dtype on WebGPU, then the CPU, as the native CPU has them."""
    with open(GENERATE / "data/held_out.txt", encoding="utf-8") as file:
        prompt = "".join(file.readline() for _ in range(4)).rstrip("\n")
    want = goldens()
    got = page.write(prompt=prompt, count=64, temperature=0)
    expect("the native CPU's text, f16 on WebGPU", repr(got[:40]), got == want["f16"])
    for kv in ("f32", "bf16", "e4m3"):
        got = page.choose("kv", kv)
        expect(f"the native CPU's text, {kv} on WebGPU", page.text("changed"), got == want[kv] and "new tokens" in page.text("changed"))
    page.js("document.getElementById('check').click()")
    page.wait("return document.getElementById('checked').textContent.startsWith('Largest error')", "a check")
    checked = page.text("checked")
    expect("a decode against the oracle", checked, float(checked.split()[2].rstrip(",")) < 1e-4)
    got = page.choose("device", "cpu")
    expect("the native CPU's text, e4m3 on the CPU", page.text("adapter"), got == want["e4m3"] and "runs on the CPU" in page.text("adapter"))


def changes(page):
    """What another cache dtype changes in a text is marked."""
    page.js("document.getElementById('prompt').value = document.getElementById('prompt').defaultValue")
    page.choose("kv", "f16")
    text = page.write(count=200, temperature=0.5)
    other = page.choose("kv", "e4m3")
    marked = page.js("return document.querySelector('#text mark')?.textContent ?? ''")
    print(f"    {page.text('changed')}")
    expect("e4m3 changes the text", repr(marked[:40]), marked != "" and other.endswith(marked) and text.startswith(other.removesuffix(marked)))
    went_on = page.text("other").removeprefix("…")
    expect("and f16's end is beside it", repr(went_on[:40]), page.seen("other") and text.endswith(went_on))


def keyboard(page):
    """Everything can be reached by Tab, and pictures by arrow keys."""
    reached = page.js("""return [...document.querySelectorAll('textarea, input, button, summary, [tabindex="0"]')]
        .filter((it) => it.tabIndex >= 0 && !it.disabled && it.checkVisibility()).map((it) => it.id || it.value || it.tagName)""")
    expect("can be focused", reached, {"prompt", "write", "check", "picture", "pages", "text", "SUMMARY"} <= set(reached))
    cells = []
    for element, keys in (("picture", "\ue012\ue012\ue013"), ("pages", "\ue014\ue014")):
        page.js("document.getElementById(arguments[0]).focus()", element)
        focused = page.text(f"{element}-cell")
        page.post("/actions", actions=[{"type": "key", "id": "keys", "actions": [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]}])
        cells.append(page.text(f"{element}-cell"))
        expect(f"arrow keys in {element}", cells[-1], cells[-1] != focused)
    expect("a weight and its token are told", cells[0], "has weight" in cells[0])


def looks(page):
    """A phone's width, dark and light."""
    grounds = []
    for scheme in ("light", "dark"):
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.append(page.js("return getComputedStyle(document.body).backgroundColor"))
    expect("dark and light", grounds, grounds[0] != grounds[1])
    page.devtools("Emulation.setEmulatedMedia", features=[])
    page.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    width = page.js("return document.scrollingElement.scrollWidth")
    expect("nothing is wider than a phone of 360", width, width <= 360)
    page.devtools("Emulation.clearDeviceMetricsOverride")


def failures(page):
    """What goes wrong is said, and can be mended."""
    page.choose("device", "gpu")
    page.js("device.destroy()")
    page.wait("return !document.getElementById('problem').hidden", "the loss is told")
    expect("a lost device", page.text("problem-text"), "The GPU is gone" in page.text("problem-text"))
    page.js("delete document.body.dataset.done; document.getElementById('again').click()")
    page.finished()
    expect("and again", page.text("adapter"), not page.seen("problem") and "on the CPU" not in page.text("adapter"))
    # While it writes.
    page.js("delete document.body.dataset.done; document.getElementById('count').value = 500; document.getElementById('write').click()")
    page.wait("return document.getElementById('speed').textContent !== '–'", "tokens")
    page.js("device.destroy()")
    page.wait("return !document.getElementById('problem').hidden", "the loss is told")
    expect("a device lost while it writes", page.text("problem-text"), "The GPU is gone" in page.text("problem-text"))
    page.js("document.getElementById('count').value = 20; document.getElementById('on-cpu').click()")
    page.finished()
    expect("and on the CPU", page.text("adapter"), "on the CPU" in page.text("adapter") and not page.seen("problem"))
    expect("uncaught errors", page.js("return uncaught"), page.js("return uncaught") == [])

    page.open()
    page.wait("return document.body.dataset.firstToken", "a first token")
    page.js("GPUQueue.prototype.submit = () => { throw new Error('broken, for a test'); }")
    page.wait("return !document.getElementById('problem').hidden", "a crash is told")
    expect("a crash", page.text("problem-text"), "Load the page again" in page.text("problem-text") and not page.js("return document.getElementById('write').disabled === false"))
    page.js("delete document.body.dataset.done; document.getElementById('again').click()")
    page.finished()
    expect("and loaded again", page.text("adapter"), not page.seen("problem"))

    Files.missing.add("model.safetensors")
    page.open()
    page.wait("return !document.getElementById('problem').hidden", "the failed download is told")
    expect("a failed download", page.text("problem-text"), "model.safetensors could not be downloaded" in page.text("problem-text"))
    Files.missing.clear()
    page.js("document.getElementById('again').click()")
    page.finished()
    expect("uncaught errors", page.js("return uncaught"), page.js("return uncaught") == [])

    page.open(NO_WEBGPU)
    page.finished()
    expect("no WebGPU", page.text("note"), page.seen("note") and "no WebGPU" in page.text("note") and "on the CPU" in page.text("adapter"))
    print(f"    on the CPU: {page.text('speed')}")
    expect("uncaught errors", page.js("return uncaught"), page.js("return uncaught") == [])


def shot(page, path):
    """A picture of the page with a text of two dtypes."""
    page.open()
    page.finished()
    page.choose("kv", "e4m3")
    page.js("document.getElementById('check').click()")
    page.wait("return document.getElementById('checked').textContent.startsWith('Largest error')", "a check")
    page.js("document.getElementById('text').scrollTop = 1e9; document.getElementById('picture').focus({ preventScroll: true }); document.activeElement.blur()")
    page.devtools("Emulation.setDeviceMetricsOverride", width=1100, height=1200, deviceScaleFactor=1, mobile=False)
    time.sleep(0.5)
    # Without the form.
    top, height = page.js("return [document.getElementById('stats').offsetTop - 8, document.documentElement.offsetHeight]")
    clip = {"x": 0, "y": top, "width": 1100, "height": height - top, "scale": 0.8}
    path.write_bytes(base64.b64decode(page.devtools("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]))
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--chromedriver", required=True)
    parser.add_argument("--capabilities", type=pathlib.Path, required=True)
    parser.add_argument("--shot", type=pathlib.Path)
    args = parser.parse_args()
    size(args.folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=args.folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = Browser(args.chromedriver, json.loads(args.capabilities.read_text()), f"http://127.0.0.1:{server.server_address[1]}/")
    try:
        if args.shot:
            shot(page, args.shot)
        else:
            for part in (first_visit, texts, changes, keyboard, looks, failures):
                part(page)
    finally:
        page.close()


if __name__ == "__main__":
    main()
